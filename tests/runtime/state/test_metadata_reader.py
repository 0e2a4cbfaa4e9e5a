"""A checkpoint that somebody tampered with is refused, and nothing that it holds is run."""

import io
import json
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from lengthwise.core.errors import InputError
from lengthwise.runtime.state import checkpoint, checkpoint_files
from lengthwise.runtime.state.metadata_reader import METADATA_FILE, Reader
from tests.runtime.state.saved import save_trained
from tests.runtime.train.runs import local_world, new_state
from tests.sim.random_plans import SPEC


class Payload:
    """Runs a function when it is unpickled."""

    def __init__(self, function, *arguments) -> None:
        self.call = (function, arguments)

    def __reduce__(self):
        return self.call


@pytest.fixture(scope="module")
def intact(ranks, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints")
    ranks(2).run(save_trained, str(folder), torch.float32)
    return checkpoint.latest(folder)


@pytest.fixture
def copied(intact, tmp_path) -> Path:
    return Path(shutil.copytree(intact, tmp_path / intact.name))


def sign_again(folder: Path) -> None:
    """As somebody does who can write to the folder: digests of everything are right."""
    document = json.loads((folder / "state.json").read_text())
    del document["blake2b"]
    document["files"] = {name: checkpoint_files.digest_of(folder / name) for name in document["files"]}
    (folder / "state.json").write_text(checkpoint_files._encoded(document))
    checkpoint.verify(folder)


def tamper(folder: Path, content: object) -> None:
    (folder / METADATA_FILE).write_bytes(content if isinstance(content, bytes) else pickle.dumps(content))
    sign_again(folder)


def metadata_of(folder: Path):
    return Reader(folder, checkpoint.read_state(folder)["files"]).metadata


def as_bytes(metadata, folder: Path, mark: Path) -> None:
    """The first tensor becomes an object, which torch's planner would unpickle a second time."""
    index, place = next((i, p) for i, p in metadata.storage_data.items() if i.fqn.startswith("master/"))
    stream = io.BytesIO()
    torch.save(Payload(Path.touch, mark), stream)
    file = folder / place.relative_path
    place.offset, place.length = file.stat().st_size, len(stream.getvalue())
    file.write_bytes(file.read_bytes() + stream.getvalue())
    metadata.state_dict_metadata[index.fqn] = BytesStorageMetadata()


def beyond(metadata, folder: Path, mark: Path) -> None:
    next(iter(metadata.storage_data.values())).length = 1 << 40


def outside(metadata, folder: Path, mark: Path) -> None:
    next(iter(metadata.storage_data.values())).relative_path = "../../secret"


def sparse(metadata, folder: Path, mark: Path) -> None:
    next(iter(metadata.state_dict_metadata.values())).size = [1, 2]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (lambda mark: Payload(Path.touch, mark), r"it names pathlib\.Path\.touch"),
        (lambda mark: Payload(os.system, f"touch {mark}"), r"it names posix\.system"),
        (lambda mark: Payload(eval, f"open({str(mark)!r}, 'w')"), r"it names builtins\.eval"),
        (lambda mark: f"ctorch.serialization\nos.system\n(S'touch {mark}'\ntR.".encode(), r"os\.system"),
        (lambda mark: {"a": 1}, "it holds a dict, not a Metadata"),
        (lambda mark: b"no pickle at all", "it is no pickle of metadata"),
        (lambda mark: b"", "it is no pickle of metadata"),
    ],
    ids=["method", "shell", "eval", "dotted name", "another object", "text", "nothing"],
)
def test_metadata_that_would_run_code_are_refused_and_nothing_is_run(copied, tmp_path, content, reason):
    mark = tmp_path / "was run"
    tamper(copied, content(mark))
    with pytest.raises(InputError, match=rf"{METADATA_FILE} was not written by lengthwise: .*{reason}"):
        checkpoint.load_weights(copied, SPEC)
    assert not mark.exists()


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (as_bytes, r"'master/.*' is a BytesStorageMetadata|it names .*BytesStorageMetadata"),
        (beyond, "lies beyond the end of"),
        (outside, r"lies in '\.\./\.\./secret', which state.json does not list"),
        (sparse, "has no size"),
    ],
)
def test_metadata_of_anything_but_tensors_in_the_listed_files_are_refused(copied, tmp_path, harm, reason):
    mark = tmp_path / "was run"
    metadata = metadata_of(copied)
    harm(metadata, copied, mark)
    tamper(copied, metadata)
    with pytest.raises(InputError, match=reason):
        checkpoint.load_weights(copied, SPEC)
    assert not mark.exists()


def test_every_rank_refuses_metadata_that_would_run_code(ranks, copied, tmp_path):
    mark = tmp_path / "was run"
    tamper(copied, Payload(Path.touch, mark))
    for told in ranks(2).run(_refusal, str(copied)):
        assert "was not written by lengthwise" in told and "nothing of it was run" in told
    assert not mark.exists()


def _refusal(path) -> str:
    with pytest.raises(InputError) as refused:
        checkpoint.load(Path(path), new_state(local_world(), torch.float32)[1])
    return str(refused.value)


def test_a_list_of_files_that_leaves_the_checkpoint_is_refused(copied):
    document = json.loads((copied / "state.json").read_text())
    del document["blake2b"]
    document["files"]["../../secret"] = {"num_bytes": 1, "blake2b": "0" * 32}
    (copied / "state.json").write_text(checkpoint_files._encoded(document))
    with pytest.raises(InputError, match=r"lists '\.\./\.\./secret'"):
        checkpoint.verify(copied)
