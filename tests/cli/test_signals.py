"""Signals stop a run at any moment, the second Ctrl-C at once; ranks listen on this machine alone."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from lengthwise.cli.launch import STOPPED_AFTER_S, check_nproc, failed_first, killed_first
from lengthwise.cli.signals import Terminated, children_of, ended_by_signals, kill_children
from lengthwise.core.errors import InputError
from tests.cli.runs import Run, make_corpus, settings, wait_until

RANK = """
import os, sys, threading
from pathlib import Path
from lengthwise.runtime.train.stop import StopRequest
stop = StopRequest(Path(sys.argv[1]), end_start=(lambda cause: os._exit(75)) if sys.argv[2] == "starts" else None)
os.write(1, b"ready")
threading.Event().wait(60)  # as in a collective or a compiler
"""


def _heed_hangups():
    """Also where these tests run under ``nohup``."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture
def rank(tmp_path):
    """A process that notes signals, and does not come to look at them."""
    started = []

    def start(phase, *wrapper):
        command = [*wrapper, sys.executable, "-c", RANK, str(tmp_path / "stop"), phase]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, preexec_fn=_heed_hangups))
        assert started[-1].stdout.read(5) == b"ready"
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_rank_that_starts_ends_at_once_when_asked_to(rank, number):
    process = rank("starts")
    process.send_signal(number)
    assert process.wait(30) == 75


def test_a_rank_that_starts_ends_when_the_file_asks(rank, tmp_path):
    process = rank("starts")
    (tmp_path / "stop").touch()
    assert process.wait(30) == 75


def test_a_rank_that_trains_ends_at_a_second_ctrl_c_and_at_no_other_signal(rank):
    process = rank("trains")
    for number in (
        signal.SIGTERM,
        signal.SIGTERM,
        signal.SIGHUP,
        signal.SIGINT,
        signal.SIGINT,
    ):  # the last: a wrapper's
        process.send_signal(number)
    time.sleep(0.6)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 130


def test_a_rank_under_nohup_does_not_stop_at_sighup(rank):
    process = rank("starts", "nohup")
    process.send_signal(signal.SIGHUP)
    time.sleep(0.3)
    assert process.poll() is None


def test_children_that_lead_a_session_are_killed_with_theirs_and_no_others():
    leader = subprocess.Popen(["sh", "-c", "sleep 100 & echo $!; wait"], stdout=subprocess.PIPE, start_new_session=True)
    other = subprocess.Popen(["sleep", "100"])
    grandchild = int(leader.stdout.readline())
    try:
        assert {leader.pid, other.pid} <= set(children_of(os.getpid()))
        assert children_of(leader.pid) == [grandchild]
        kill_children()
        assert leader.wait(30) == -signal.SIGKILL and other.poll() is None
        wait_until(lambda: not _is_alive(grandchild))
    finally:
        other.kill()
        other.wait()
        leader.stdout.close()


def _is_alive(process):
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def failures(*ended):
    return {
        rank: SimpleNamespace(
            local_rank=rank, exitcode=code, timestamp=at, signal_name=lambda code=code: signal.Signals(-code).name
        )
        for rank, (code, at) in enumerate(ended)
    }


def test_the_rank_that_a_signal_killed_first_is_told():
    assert killed_first(failures((1, 104), (-9, 100), (-15, 101))).startswith("rank 1 was killed by SIGKILL")
    assert killed_first(failures((-11, 100), (1, 100))) == "rank 0 was killed by SIGSEGV"
    assert killed_first(failures((1, 100), (-15, 100))) == ""


def test_the_rank_that_ended_first_is_told_where_no_rank_said_why():
    assert failed_first(failures((1, 101), (7, 100))) == "rank 1 ended with exit code 7, and said nothing"
    assert failed_first(failures((-15, 100), (1, 101))) == "rank 0 ended with SIGTERM, and said nothing"


def test_a_rank_that_torchrun_killed_because_another_failed_is_not_told():
    assert killed_first(failures((1, 100), (-9, 100 + STOPPED_AFTER_S))) == ""


def test_more_ranks_than_a_machine_may_run_are_refused_with_the_limit():
    check_nproc(8)
    with pytest.raises(InputError, match=r"--nproc 10000: this machine may run [\d,]+ at most, 32 for each of its"):
        check_nproc(10_000)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return make_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture
def start(corpus, tmp_path, monkeypatch):
    """A run of one rank whose temporary files have a folder of their own; what is left of it ends with the test."""
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr(tempfile, "tempdir", None)
    options = settings(corpus, tmp_path / "run", "train.steps=100000", "plan.policy=static", "train.checkpoint_every=0")
    run = Run(tmp_path / "run", "-m", "lengthwise", "train", *options, "--nproc", 1, num_ranks=1)
    yield run
    run.kill_everything()


def test_a_run_whose_rank_hangs_ends_at_the_second_ctrl_c_and_listens_on_this_machine_alone(start, tmp_path):
    start.wait_for(0)
    assert list((tmp_path / "tmp").glob("lengthwise-*"))
    (rank,) = start.running.values()
    for process in (start.process.pid, rank):
        listened = _listened_addresses(process)
        assert listened and listened <= {"127.0.0.1"}
    os.kill(rank, signal.SIGSTOP)
    for _ in range(2):
        start.process.send_signal(signal.SIGINT)
        time.sleep(0.6)
    code, printed = start.end()
    assert "in flight, with a checkpoint; Ctrl-C once more" in printed
    assert code == 130 and "ended at once by a second Ctrl-C, without saving" in printed, printed[-2000:]
    assert start.status() == ("crashed", 130)
    assert not list((tmp_path / "tmp").glob("lengthwise-*")) and not list((tmp_path / "tmp").glob("torchelastic*"))


def _listened_addresses(process):
    """Addresses on which a process accepts connections."""
    links = [os.readlink(path) for path in Path(f"/proc/{process}/fd").iterdir() if os.path.islink(path)]
    inodes = {link.removeprefix("socket:[").rstrip("]") for link in links if link.startswith("socket:[")}
    addresses = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{process}/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == "0A" and rest[5] in inodes:
                address = local.partition(":")[0]
                is_loopback = address in ("0100007F", "0000000000000000FFFF00000100007F")
                addresses.add("127.0.0.1" if is_loopback else address)
    return addresses


def test_a_run_that_is_asked_to_stop_while_its_ranks_start_ends_with_75(start):
    wait_until(lambda: list(start.process.ranks.iterdir()))
    start.process.send_signal(signal.SIGTERM)
    code, printed = start.end()
    assert code == 75, printed[-2000:]
    assert "Traceback" not in printed
    assert "stopping while ranks start; no step has begun" in printed and "step in flight" not in printed
    assert start.folder.read_json("status.json").get("state", "") in ("preempted", ""), "or no rank had begun"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_command_without_ranks_is_ended_once_by_a_signal(number):
    before = signal.signal(number, signal.SIG_DFL)
    try:
        with pytest.raises(Terminated) as stopped, ended_by_signals():
            try:
                os.kill(os.getpid(), number)
            finally:
                os.kill(os.getpid(), number)  # as schedulers send it, while the command ends
        assert stopped.value.exit_code == 128 + number
        assert signal.getsignal(number) is signal.SIG_DFL
    finally:
        signal.signal(number, before)


@pytest.mark.first_cells(1)
@pytest.mark.parametrize(
    ("number", "code", "words"),
    [
        (signal.SIGTERM, 128 + signal.SIGTERM, "error: stopped by SIGTERM; run the same command again to go on\n"),
        (signal.SIGINT, 128 + signal.SIGINT, "error: interrupted\n"),
    ],
)
def test_an_index_that_is_stopped_ends_with_its_workers_and_one_line(tmp_path, number, code, words):
    rows = json.dumps({"text": "a row of text " * 20}) + "\n"
    (tmp_path / "a.jsonl").write_text(rows * 50_000)
    command = [sys.executable, "-m", "lengthwise", "index", tmp_path / "a.jsonl", "--out", tmp_path / "out"]
    process = subprocess.Popen([*command, "--workers", "2"], stderr=subprocess.PIPE, text=True, start_new_session=True)
    place = "parts" if number == signal.SIGINT else "parts/0*"  # workers start, or work
    wait_until(lambda: process.poll() is not None or any((tmp_path / "out").glob(place)))
    os.killpg(process.pid, number)  # as a terminal sends it: to the workers, too
    said = process.communicate(timeout=60)[1]
    assert process.returncode == code, "it was over before it could be stopped"
    assert said == words
    assert (tmp_path / "out" / "parts").is_dir() and not list((tmp_path / "out").glob("*.lock"))
