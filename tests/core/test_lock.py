"""One process at a time holds a folder, and a lock that nobody holds any more stops nobody."""

import json
import multiprocessing
import os
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from lengthwise.core import lock
from lengthwise.core.lock import STALE_S, FolderLock, Holder, InUseError

FORK = multiprocessing.get_context("fork")
PATIENCE_S = 60.0


def make(folder: Path) -> FolderLock:
    return FolderLock(folder / "a.lock", user="a run", way_out="wait for it to end")


def take_and_die(folder: Path) -> None:
    make(folder).acquire()
    os._exit(0)


def write(folder: Path, holder: Holder, *, age_s: float = 0.0) -> None:
    """A lock as another process would have written it so long ago."""
    file = folder / "a.lock"
    file.write_text(json.dumps(asdict(holder)))
    changed_s = time.time() - age_s
    os.utime(file, (changed_s, changed_s))


def test_who_holds_a_folder_is_named_to_the_second_and_it_is_free_again_afterwards(tmp_path):
    with make(tmp_path).held():
        with pytest.raises(InUseError, match=rf"is in use by a run: process {os.getpid()} on .*\(.*\), since 20.*wait"):
            make(tmp_path).acquire()
        with pytest.raises(InUseError):
            make(tmp_path).check_free()
    make(tmp_path).check_free()
    assert not list(tmp_path.iterdir())


def _take_turns(folder: Path, num_turns: int) -> None:
    for _ in range(num_turns):
        holder = make(folder)
        holder.acquire(wait_s=PATIENCE_S)
        log = os.open(folder / "log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(log, f"{os.getpid()}\n".encode())
        time.sleep(0.001)
        os.write(log, f"{os.getpid()}\n".encode())
        os.close(log)
        holder.release()


def test_processes_that_want_a_folder_at_once_have_it_one_after_the_other(tmp_path, monkeypatch):
    monkeypatch.setattr(time, "sleep", lambda seconds: threading.Event().wait(min(seconds, 0.002)))
    processes = [FORK.Process(target=_take_turns, args=(tmp_path, 8)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    pids = (tmp_path / "log").read_text().split()
    assert len(pids) == 64
    assert all(first == second for first, second in zip(pids[::2], pids[1::2]))


def test_the_lock_of_a_process_that_died_is_taken_over(tmp_path):
    process = FORK.Process(target=take_and_die, args=(tmp_path,))
    process.start()
    while os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
        pass
    assert (tmp_path / "a.lock").exists()
    with make(tmp_path).held():  # it has ended, but nobody has buried it yet
        process.join()
        assert [path.name for path in tmp_path.iterdir()] == ["a.lock"]


def test_the_lock_of_a_process_that_is_gone_is_taken_over_and_that_of_another_user_is_not(tmp_path, monkeypatch):
    process = FORK.Process(target=os.getpid)
    process.start()
    process.join()
    write(tmp_path, replace(Holder.this_process(), pid=process.pid))
    make(tmp_path).check_free()
    write(tmp_path, replace(Holder.this_process(), started=""))

    def forbidden(pid, number):
        raise PermissionError

    monkeypatch.setattr(os, "kill", forbidden)
    with pytest.raises(InUseError):
        make(tmp_path).acquire()


def test_who_waits_takes_the_lock_as_soon_as_it_is_free(tmp_path, monkeypatch):
    first, second = make(tmp_path), make(tmp_path)
    first.acquire()
    monkeypatch.setattr(time, "sleep", lambda seconds: first.release())
    second.acquire(wait_s=PATIENCE_S)
    assert second.is_held()
    second.release()


def test_age_is_told_by_the_clock_of_the_file_system(tmp_path, monkeypatch):
    write(tmp_path, replace(Holder.this_process(), machine="another boot"), age_s=STALE_S / 2)
    now_s = time.time()
    monkeypatch.setattr(time, "time", lambda: now_s + 10 * STALE_S)
    with pytest.raises(InUseError, match=r"sign of life is 3\d s old"):
        make(tmp_path).acquire()


def test_a_lock_that_is_away_for_a_moment_is_not_lost(tmp_path, monkeypatch):
    """Another process moves it aside to look whether it is stale."""
    monkeypatch.setattr(lock, "BEAT_S", 0.01)
    held, lost, looks, seen = make(tmp_path), threading.Event(), iter([False]), threading.Event()
    is_held = held.is_held

    def look():
        answer = next(looks, None)
        if answer is None:
            seen.set()
        return is_held() if answer is None else answer

    monkeypatch.setattr(held, "is_held", look)
    held.acquire(on_lost=lost.set)
    assert seen.wait(PATIENCE_S) and not lost.is_set()
    held.release()


def test_another_process_with_the_number_of_the_holder_is_not_taken_for_it(tmp_path):
    write(tmp_path, replace(Holder.this_process(), started="1"))
    with make(tmp_path).held():
        pass


@pytest.mark.parametrize("machine", ["another boot", ""])
def test_a_lock_of_another_machine_counts_while_it_shows_signs_of_life(tmp_path, machine):
    holder = replace(Holder.this_process(), machine=machine, host="far-away", pid=1)
    write(tmp_path, holder, age_s=STALE_S / 2)
    with pytest.raises(InUseError, match=r"process 1 on far-away .* sign of life is 3\d s old; after 60 s"):
        make(tmp_path).acquire()
    write(tmp_path, holder, age_s=2 * STALE_S)
    with make(tmp_path).held():
        pass


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b'{"token": 1}', b"\xff\xfe"])
def test_a_lock_that_is_being_written_counts_and_one_that_never_was_does_not(tmp_path, content):
    file = tmp_path / "a.lock"
    file.write_bytes(content)
    with pytest.raises(InUseError, match="has just begun"):
        make(tmp_path).acquire()
    long_ago = time.time() - 2 * STALE_S
    os.utime(file, (long_ago, long_ago))
    with make(tmp_path).held():
        pass


def test_of_two_that_find_a_stale_lock_the_slower_does_not_remove_the_lock_of_the_faster(tmp_path, monkeypatch):
    write(tmp_path, replace(Holder.this_process(), started="1"))
    faster, slower = make(tmp_path), make(tmp_path)
    now_s = slower._now_s

    def after_the_faster():
        if not faster.token:
            faster.acquire()
        return now_s()

    monkeypatch.setattr(slower, "_now_s", after_the_faster)
    with pytest.raises(InUseError):
        slower.acquire()
    assert faster.is_held()
    faster.release()


def test_a_holder_shows_that_it_lives_and_notices_that_its_lock_is_gone(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "BEAT_S", 0.01)
    held, lost = make(tmp_path), threading.Event()
    held.acquire(on_lost=lost.set)
    os.utime(held.file, (0, 0))
    while held.file.stat().st_mtime < 1:
        time.sleep(0.005)
    held.file.unlink()
    assert lost.wait(PATIENCE_S)
    other = make(tmp_path)
    other.acquire()
    held.release()  # it is another's now
    assert other.is_held()
    other.release()


def test_a_folder_that_cannot_be_written_is_no_matter_of_locks(tmp_path):
    with pytest.raises(OSError, match="No such file"):
        make(tmp_path / "nowhere").acquire()


def test_a_lock_is_of_a_run_if_one_of_its_processes_took_it_or_a_child_of_one(tmp_path):
    launcher, first = FolderLock(tmp_path / "b.lock", user="a run", way_out=""), make(tmp_path)
    assert not first.is_of_another({"any"}), "nobody has it"
    with launcher.held():
        first.acquire(parent=launcher.token)
        for tokens in ({first.token}, {launcher.token}, {launcher.token, "others"}):
            assert not first.is_of_another(tokens)
        assert first.is_of_another({"others"}) and first.is_of_another(())
        first.release()


def test_who_slept_and_lost_a_lock_knows_before_it_writes(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "BEAT_S", 1000.0)
    slow, lost = make(tmp_path), threading.Event()
    slow.acquire(on_lost=lost.set)
    slow.check_held()
    assert not lost.is_set()
    slow.file.unlink()
    with make(tmp_path).held():
        slow.check_held()
        assert lost.is_set()
    slow.release()


def test_a_long_command_of_who_holds_a_lock_ends_in_dots(monkeypatch):
    monkeypatch.setattr("sys.argv", ["lengthwise", "train", "x" * 300])
    command = Holder.this_process().command
    assert len(command) == 200 and command.startswith("lengthwise train xxx") and command.endswith("x...")
    monkeypatch.setattr("sys.argv", ["lengthwise", "train"])
    assert Holder.this_process().command == "lengthwise train"
