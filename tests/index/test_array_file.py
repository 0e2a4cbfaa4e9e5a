"""Files that change under a reader are an error with a sentence: no signal ends the process, nothing wrong is read."""

import os
import pickle
import threading

import numpy as np
import pytest

from lengthwise.core.errors import InputError, LengthwiseError
from lengthwise.index.array_file import ArrayFile, load_array


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "numbers.npy"
    np.save(path, np.arange(100_000, dtype=np.int32))
    return path


def test_any_range_is_the_array_s_own_and_read_only(file):
    array = ArrayFile.of_npy(file)
    assert len(array) == 100_000
    for start, stop in ((0, 1), (0, 0), (99_999, 100_000), (123, 4567), (0, 100_000)):
        values = array.read(start, stop)
        assert values.dtype == np.int32 and not values.flags.writeable
        assert np.array_equal(values, np.arange(start, stop))


def test_threads_read_one_file_at_once(file):
    array, wrong = ArrayFile.of_npy(file), []

    def read(seed):
        for start in np.random.default_rng(seed).integers(0, 99_000, 300).tolist():
            if not np.array_equal(array.read(start, start + 1000), np.arange(start, start + 1000)):
                wrong.append(start)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("size", [0, 100, 399_000])
def test_a_file_that_shrinks_is_an_error_wherever_it_is_read(file, size):
    array = ArrayFile.of_npy(file)
    os.truncate(file, size)
    for start in (0, 99_990):
        with pytest.raises(LengthwiseError, match=rf"numbers\.npy has {size:,} bytes instead of 400,128 since"):
            array.read(start, start + 5)


def test_a_file_that_is_written_to_is_an_error_though_its_size_is_the_same(file):
    array = ArrayFile.of_npy(file)
    with file.open("rb+") as stream:
        stream.seek(1000)
        stream.write(b"?")
    os.utime(file, ns=(1, 1))
    with pytest.raises(LengthwiseError, match=r"has been written to since it was opened; restore it.* --verify"):
        array.read(0, 5)


def test_a_file_that_is_replaced_or_removed_is_read_on_as_it_was(file):
    array = ArrayFile.of_npy(file)
    np.save(file.with_name("other.npy"), np.zeros(5))
    file.with_name("other.npy").replace(file)
    assert np.array_equal(array.read(7, 9), [7, 8])
    file.unlink()
    assert np.array_equal(array.read(99_998, 100_000), [99_998, 99_999])


def test_another_process_gets_the_same_file_or_an_error(file):
    array = ArrayFile.of_npy(file)
    assert np.array_equal(pickle.loads(pickle.dumps(array)).read(5, 7), [5, 6])
    dumped = pickle.dumps(array)
    os.truncate(file, 300)
    with pytest.raises(LengthwiseError, match="has 300 bytes instead of 400,128"):
        pickle.loads(dumped)


@pytest.mark.parametrize("array", [np.zeros((2, 2)), np.array(5), np.array([{"a": 1}], dtype=object)])
def test_only_rows_of_numbers_are_opened(tmp_path, array):
    np.save(tmp_path / "a.npy", array, allow_pickle=True)
    with pytest.raises(ValueError, match="not a row of numbers"):
        ArrayFile.of_npy(tmp_path / "a.npy")


@pytest.mark.parametrize("content", [b"", b"\x93NUMPY", b"no array", b"\x93NUMPY\x01\x00v\x00{'descr': '<i8'"])
def test_what_is_no_array_is_refused_by_name(tmp_path, content):
    (tmp_path / "a.npy").write_bytes(content)
    with pytest.raises(InputError, match=r"a\.npy holds no array of numbers .*; mend it"):
        load_array(tmp_path / "a.npy", way_out="mend it")
    with pytest.raises(InputError, match=r"b\.npy holds no array of numbers \(No such file"):
        load_array(tmp_path / "b.npy", way_out="mend it")


def test_objects_are_not_unpickled(tmp_path):
    class Payload:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "was run"),)

    np.save(tmp_path / "a.npy", np.array([Payload()], dtype=object), allow_pickle=True)
    with pytest.raises(InputError, match="holds no array of numbers"):
        load_array(tmp_path / "a.npy", way_out="mend it")
    assert not (tmp_path / "was run").exists()
