"""Which index an index is: its files are checked against one another when it is opened."""

import json

import numpy as np
import pytest

from lengthwise.core.errors import InputError
from lengthwise.index.store import open_index
from tests.index.build import build, write_jsonl


@pytest.fixture
def index(tmp_path):
    return build(write_jsonl(tmp_path / "a.jsonl", ["one", "two and", "three"]), tmp_path / "index").path


@pytest.mark.parametrize("change", [lambda ends: ends + 1, lambda ends: np.append(ends, ends[-1] + 5)])
def test_offsets_that_begin_after_0_or_go_on_after_the_last_sequence_are_refused(index, change):
    """Even where index.json was changed with them, and every difference of theirs is the length of a sequence."""
    np.save(index / "offsets.npy", change(np.load(index / "offsets.npy")))
    info = json.loads((index / "index.json").read_text())
    info["files"]["offsets.npy"] = (index / "offsets.npy").stat().st_size
    (index / "index.json").write_text(json.dumps(info))
    with pytest.raises(InputError, match=r"offsets\.npy and lengths\.npy disagree; index again with --restart"):
        open_index(index)
