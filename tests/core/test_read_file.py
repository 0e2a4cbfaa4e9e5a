"""Files are read within a limit, and a short one in little memory."""

import tracemalloc

import pytest

from lengthwise.core.errors import InputError
from lengthwise.core.read_file import CHUNK, MAX_DOCUMENT_BYTES, parse_json, read_bytes


@pytest.mark.parametrize("size", [0, 7, CHUNK, 2 * CHUNK + 1])
def test_a_file_is_read_in_memory_of_about_its_size(tmp_path, size):
    path = tmp_path / "status.json"
    path.write_bytes(bytes(size))
    tracemalloc.start()
    content = read_bytes(path, what="a status")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert content == bytes(size)
    assert peak < 3 * size + 4 * CHUNK < MAX_DOCUMENT_BYTES // 4


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"a":\n', "expecting value at column 6"),
        ('{"a": 1,\n "b":\n\n', "expecting value at line 2, column 6"),
        ('["a', "unterminated string starting at column 2"),
        ('["\n"]', "invalid control character at column 3"),
    ],
)
def test_what_is_no_json_is_refused_where_it_ends_or_goes_wrong(text, said):
    with pytest.raises(ValueError, match=f"^{said}$"):
        parse_json(text)


def test_one_beyond_the_limit_is_refused(tmp_path):
    path = tmp_path / "large"
    path.write_bytes(bytes(11))
    assert read_bytes(path, what="a file", max_bytes=11) == bytes(11)
    with pytest.raises(InputError, match="has 11 bytes; a file has at most 10"):
        read_bytes(path, what="a file", max_bytes=10)
