"""An index is whole or it is not there: killed, resumed, parallel or restarted, the bytes are the same."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from lengthwise.core.errors import InputError, LengthwiseError
from lengthwise.index import build_folder
from lengthwise.index.build import build_index
from lengthwise.index.build_folder import claim, only_builder
from lengthwise.index.settings import IndexSettings
from lengthwise.index.store import open_index
from tests.index.build import SMALL_UNIT, build, files_of, places_of, texts_of, write_jsonl, write_tree

TEXTS = [f"document {number} " * (1 + number % 13) for number in range(400)]


@pytest.fixture
def corpus(tmp_path):
    return write_jsonl(tmp_path / "a.jsonl", TEXTS)


@pytest.fixture
def undisturbed(corpus, tmp_path):
    return files_of(build(corpus, tmp_path / "undisturbed", unit_bytes=2048).path)


def test_an_index_holds_every_document_once_in_order(corpus, tmp_path):
    store = build(corpus, tmp_path / "out", unit_bytes=2048)
    assert texts_of(store) == [text.encode() for text in TEXTS]
    assert [place["line"] for place in places_of(store)] == list(range(1, 401))
    assert store.lengths.num_tokens == store.info["num_tokens"] == sum(len(text) + 1 for text in TEXTS)
    assert sorted(files_of(store.path)) == ["documents.jsonl", "index.json", "lengths.npy", "offsets.npy", "tokens.bin"]


def test_the_number_of_workers_does_not_change_a_byte(corpus, tmp_path, undisturbed):
    assert files_of(build(corpus, tmp_path / "out", unit_bytes=2048, workers=3).path) == undisturbed


def test_the_size_of_work_units_does_not_change_the_digest(corpus, tmp_path):
    assert len({build(corpus, tmp_path / f"{size}", unit_bytes=size).digest for size in (500, 5000, 1 << 20)}) == 1


_BUILD = """
import sys
from pathlib import Path
from lengthwise.index.build import build_index
from lengthwise.index.settings import IndexSettings
if __name__ == "__main__":
    settings = IndexSettings(source=Path(sys.argv[1]), unit_bytes=32768)
    build_index(settings, Path(sys.argv[2]), workers=int(sys.argv[3]))
"""


def test_a_build_goes_on_while_a_worker_of_a_killed_one_writes_its_last_file(tmp_path, monkeypatch):
    parts = claim(tmp_path, {}, "mark", restart=False)
    stray = parts / "0000006.partial-7"
    stray.mkdir()
    remove, calls = shutil.rmtree, []

    def remove_beside_a_worker(folder):
        calls.append(folder)
        if len(calls) < 3:
            raise OSError(errno.ENOTEMPTY, "Directory not empty", folder)
        remove(folder)

    monkeypatch.setattr(build_folder.shutil, "rmtree", remove_beside_a_worker)
    assert claim(tmp_path, {}, "mark", restart=False) == parts and calls == [stray] * 3 and not stray.exists()


@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.deep), 2])
def test_a_killed_build_is_no_index_and_goes_on_to_the_same_bytes(tmp_path, workers):
    corpus = write_jsonl(tmp_path / "a.jsonl", TEXTS * 60)
    out = tmp_path / "out"
    script = tmp_path / "build_it.py"
    script.write_text(_BUILD)
    process = subprocess.Popen([sys.executable, script, corpus, out, str(workers)], stderr=subprocess.DEVNULL)
    while process.poll() is None and len(list(out.glob("parts/???????"))) < 5:
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL, "the build was over before it could be killed"
    with pytest.raises(InputError, match="half-written; run the same `lengthwise index` command again"):
        open_index(out)
    resumed = build_index(IndexSettings(source=corpus, unit_bytes=32768), out, workers=1)
    assert resumed.num_resumed_units >= 5
    assert files_of(out) == files_of(build(corpus, tmp_path / "undisturbed", unit_bytes=32768).path)


@pytest.mark.parametrize("victim", ["tokens.bin", "offsets.npy", "documents.jsonl", "index.json"])
def test_a_build_killed_while_joining_goes_on_to_the_same_bytes(corpus, tmp_path, undisturbed, monkeypatch, victim):
    replace = os.replace

    def killed_at(source, target):
        if os.path.basename(target) == victim:
            raise Killed
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr("pathlib.Path.replace", lambda self, target: killed_at(self, target))
        with pytest.raises(Killed):
            build(corpus, tmp_path / "out", unit_bytes=2048)
    with pytest.raises(InputError, match="half-written"):
        open_index(tmp_path / "out")
    assert files_of(build(corpus, tmp_path / "out", unit_bytes=2048).path) == undisturbed


class Killed(BaseException):
    """Stands for a kill."""


@pytest.mark.parametrize("bad", ["{", '{"text": ""}'])
def test_an_index_is_kept_where_its_replacement_cannot_be_built(corpus, tmp_path, undisturbed, bad):
    out = tmp_path / "out"
    build(corpus, out, unit_bytes=2048)
    (tmp_path / "b.jsonl").write_text('{"text": "fine"}\n' + bad)
    for restart in (True, False):
        with pytest.raises(InputError, match=r"b\.jsonl:2" if restart else "another index"):
            build(tmp_path / "b.jsonl", out, restart=restart)
        assert files_of(out) == undisturbed
    with pytest.raises(InputError, match="no file or folder"):
        build(tmp_path / "c.jsonl", out, restart=True)
    assert files_of(out) == undisturbed


@pytest.fixture(scope="module")
def two_corpora(tmp_path_factory):
    """Each with its index."""
    folder = tmp_path_factory.mktemp("corpora")
    rows = [{"input_ids": [k, k + 1, 2], "labels": [-100, -100, 2]} for k in range(300)]
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_jsonl(folder / "b.jsonl", TEXTS)
    return [(folder / name, build(folder / name, folder / f"{name}-index").path) for name in ("a.jsonl", "b.jsonl")]


@pytest.mark.parametrize("number", range(12))
def test_a_replacement_that_is_killed_keeps_one_of_both_and_goes_on(two_corpora, tmp_path, monkeypatch, number):
    (old, old_index), (new, new_index) = two_corpora
    before, after = files_of(old_index), files_of(new_index)
    shutil.copytree(old_index, tmp_path / "out")
    num_moved, replace = 0, Path.replace

    def killed_at(self, target):
        nonlocal num_moved
        if num_moved == number:
            raise Killed
        num_moved += 1
        return replace(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", killed_at)
        with pytest.raises(Killed):
            build(new, tmp_path / "out", restart=True)
    state = files_of(tmp_path / "out")
    if "index.json" in state:
        assert state == before
        assert open_index(tmp_path / "out").has_loss_mask
        assert build_index(IndexSettings(source=old, unit_bytes=SMALL_UNIT), tmp_path / "out", workers=1).was_up_to_date
    build(new, tmp_path / "out", restart="index.json" in state)
    assert files_of(tmp_path / "out") == after


def test_a_replacement_that_was_interrupted_goes_on_where_it_was(corpus, tmp_path, monkeypatch):
    out, new = tmp_path / "out", write_jsonl(tmp_path / "b.jsonl", TEXTS[::-1])
    build(corpus, out)
    settings = IndexSettings(source=new, unit_bytes=SMALL_UNIT)
    for restart in (True, False):
        with monkeypatch.context() as patch:
            patch.setattr("lengthwise.index.build.put_in_place", lambda out: None)
            patch.setattr("lengthwise.index.build.assemble", lambda *_, **__: (_ for _ in ()).throw(Killed))
            with pytest.raises(Killed):
                build_index(settings, out, workers=1, restart=True)
        assert len(open_index(out)) == len(TEXTS) and texts_of(open_index(out))[0] == TEXTS[0].encode()
        assert build_index(settings, out, workers=1, restart=restart).num_resumed_units > 3
        assert texts_of(open_index(out))[0] == TEXTS[-1].encode()
        assert build_index(settings, out, workers=1, restart=True).num_resumed_units == 0, "of a finished one, anew"
        build(corpus, out, restart=True)


def test_parts_left_behind_by_a_late_kill_are_cleared_away(corpus, tmp_path, undisturbed, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(build_folder.shutil, "rmtree", lambda *_, **__: None)
        build(corpus, tmp_path / "out", unit_bytes=2048)
    assert (tmp_path / "out" / "parts").is_dir()
    assert files_of(build(corpus, tmp_path / "out", unit_bytes=2048).path) == undisturbed


def test_an_up_to_date_index_is_left_alone(corpus, tmp_path):
    build(corpus, tmp_path / "out")
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    assert build_index(IndexSettings(source=corpus, unit_bytes=SMALL_UNIT), tmp_path / "out", workers=1).was_up_to_date
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()} == before


def test_another_request_is_refused_by_name_until_restarted(corpus, tmp_path):
    out = tmp_path / "out"
    build(corpus, out)
    with pytest.raises(InputError, match=r"another index \(append_eos: True then, False now\).*--restart"):
        build(corpus, out, append_eos=False)
    write_jsonl(corpus, [*TEXTS, "one more"])
    with pytest.raises(InputError, match="the source files changed"):
        build(corpus, out)
    assert len(build(corpus, out, restart=True)) == len(TEXTS) + 1


def test_bad_input_leaves_nothing_begun_so_that_mending_it_is_enough(corpus, tmp_path):
    out = tmp_path / "out"
    write_jsonl(corpus, [*TEXTS, ""])
    with pytest.raises(InputError, match=r"a\.jsonl:401 is empty"):
        build(corpus, out)
    assert not out.exists()
    write_jsonl(corpus, TEXTS)
    assert len(build(corpus, out)) == len(TEXTS)


def test_a_field_that_is_not_there_leaves_nothing_begun(tmp_path):
    pa = pytest.importorskip("pyarrow")
    with pa.ipc.new_stream(tmp_path / "a.arrow", pa.schema({"body": pa.string()})) as writer:
        writer.write(pa.record_batch({"body": ["text"]}))
    with pytest.raises(InputError, match="no column 'text'"):
        build(tmp_path / "a.arrow", tmp_path / "out")
    assert texts_of(build(tmp_path / "a.arrow", tmp_path / "out", field="body")) == [b"text"]


def test_a_half_written_index_of_another_request_is_refused_until_restarted(corpus, tmp_path, monkeypatch):
    out = tmp_path / "out"

    def killed(*arguments, **options):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("lengthwise.index.build.assemble", killed)
        with pytest.raises(KeyboardInterrupt):
            build(corpus, out)
    write_jsonl(corpus, [*TEXTS, "one more"])
    with pytest.raises(InputError, match=r"half-written index of another request.*the source files changed"):
        build(corpus, out)
    assert len(build(corpus, out, restart=True)) == len(TEXTS) + 1


@pytest.mark.parametrize("restart", [False, True])
def test_a_folder_that_is_no_index_is_never_touched(corpus, tmp_path, restart):
    precious = write_tree(tmp_path / "model", {"tokenizer.json": b"{}", "index.json": b"[]", "parts/x": b"x"})
    (precious / "index.json").unlink()
    with pytest.raises(InputError, match="not empty"):
        build(corpus, precious, restart=restart)
    assert (precious / "tokenizer.json").read_bytes() == b"{}" and (precious / "parts" / "x").read_bytes() == b"x"


def test_two_builds_into_one_folder_exclude_each_other(corpus, tmp_path):
    (tmp_path / "out").mkdir()
    with (
        only_builder(tmp_path / "out"),
        pytest.raises(InputError, match=r"in use by another build .*: process \d+ on"),
    ):
        build(corpus, tmp_path / "out")
    build(corpus, tmp_path / "out")
    assert not list((tmp_path / "out").glob("*.lock*"))


def test_an_error_in_a_worker_reaches_the_user(corpus, tmp_path):
    write_jsonl(corpus, [*TEXTS, 5])
    with pytest.raises(InputError, match=r"a\.jsonl:401: expected text, found int"):
        build(corpus, tmp_path / "out", unit_bytes=2048, workers=2)


def test_a_place_that_cannot_be_a_folder_is_refused(corpus, tmp_path):
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "out", tmp_path / ("x" * 300)):
        with pytest.raises(InputError, match=r"cannot be made a folder.*name another"):
            build(corpus, out)
    for workers in (-1, 0, 100_000):
        with pytest.raises(InputError, match=f"--workers {workers}"):
            build(corpus, tmp_path / "out", workers=workers)


def test_a_full_disk_is_an_error_that_keeps_what_is_finished(corpus, tmp_path, monkeypatch):
    def full(file):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(LengthwiseError, match=r"No space left on device; finished parts are kept.*same command"):
            build(corpus, tmp_path / "out")
    assert len(build(corpus, tmp_path / "out")) == len(TEXTS)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("tokens.bin", "tokens.bin has"),
        ("lengths.npy", "digest"),
        ("offsets.npy", "disagree"),
        ("documents.jsonl", "missing"),
    ],
)
def test_a_damaged_index_is_refused(corpus, tmp_path, name, said):
    path = build(corpus, tmp_path / "out").path / name
    if name == "tokens.bin":
        path.write_bytes(path.read_bytes()[:-2])
    elif name == "documents.jsonl":
        path.unlink()
    else:
        array = np.load(path)
        array[1] += 1
        np.save(path, array)
    with pytest.raises(InputError, match=f"{said}.*--restart"):
        open_index(tmp_path / "out")


def test_a_folder_without_index_and_an_index_of_another_version_are_refused(corpus, tmp_path):
    with pytest.raises(InputError, match="no index at"):
        open_index(tmp_path)
    with pytest.raises(InputError, match="no index at nowhere in the current folder, /"):
        open_index(Path("nowhere"))
    note = build(corpus, tmp_path / "out").path / "index.json"
    note.write_text(json.dumps({**json.loads(note.read_text()), "schema_version": 99}))
    with pytest.raises(InputError, match="schema version 99"):
        open_index(tmp_path / "out")
    note.write_text("{")
    with pytest.raises(InputError, match="not that of an index"):
        open_index(tmp_path / "out")


def test_tokens_are_read_only_views_and_ids_are_checked(corpus, tmp_path):
    store = build(corpus, tmp_path / "out")
    with pytest.raises(ValueError, match="read-only"):
        store.tokens(0)[0] = 1
    for id in (-1, len(TEXTS)):
        with pytest.raises(InputError, match=f"no sequence {id} "):
            store.tokens(id)


@pytest.mark.deep
def test_200_thousand_lines_in_many_units_equal_the_source(tmp_path):
    texts = [str(number) * (1 + number % 40) for number in range(200_000)]
    store = build(write_jsonl(tmp_path / "a.jsonl", texts), tmp_path / "out", unit_bytes=1 << 16, workers=2)
    offsets = np.concatenate([[0], np.cumsum([len(text) + 1 for text in texts])])
    assert np.array_equal(np.diff(offsets), store.lengths.lengths)
    for id in range(0, 200_000, 997):
        assert bytes(store.tokens(id)[:-1].astype(np.uint8)) == texts[id].encode()


def test_a_million_lengths_are_indexed_and_opened(tmp_path):
    lengths = np.arange(1, 1_000_001, dtype=np.int32)
    np.save(tmp_path / "lengths.npy", lengths)
    store = build(tmp_path / "lengths.npy", tmp_path / "out", unit_bytes=1 << 20)
    assert np.array_equal(store.lengths.lengths, lengths)
