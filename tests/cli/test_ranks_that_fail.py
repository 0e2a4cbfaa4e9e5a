"""Ranks under torchrun that differ, hang, die or leave: the run ends in bounded time, and one message says why."""

from pathlib import Path

import pytest

from tests.cli.runs import Run, make_corpus, settings
from tests.runtime.harness import free_port
from tests.warm import Command

SCRIPT = Path(__file__).with_name("faulty_rank.py")
TIMEOUT_S = 6


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return make_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture
def end(corpus, tmp_path, monkeypatch):
    """Run ranks to their end; what was printed, and status.json."""
    runs = []

    def run(*more, fault="", num_ranks=2):
        if fault:
            monkeypatch.setenv("FAULT", fault)
        torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", num_ranks, "--master-port", free_port()]
        options = ["train.steps=5", "plan.policy=static", f"train.timeout_s={TIMEOUT_S}"]
        runs.append(
            Run(
                tmp_path / "run",
                *torchrun,
                SCRIPT,
                *settings(corpus, tmp_path / "run", *options),
                *more,
                num_ranks=num_ranks,
            )
        )
        code, printed = runs[-1].end()
        assert code == 1, printed[-3000:]  # torchrun's own
        errors = [line for line in printed.splitlines() if line.startswith("error: ")]
        assert len(errors) == 1, printed[-3000:]
        return errors[0].removeprefix("error: "), runs[-1].status()

    yield run
    for one in runs:
        one.kill_everything()


def test_ranks_with_other_settings_are_refused_before_they_train(end, tmp_path):
    message, status = end("--rank-1", "train.steps=6", "optim.lr=1e-5", "optim.name=adafactor", "train.log_every=2")
    assert message.startswith(
        'the ranks do not agree: optim.lr is 0.0003 on rank 0, 1e-05 on rank 1; optim.name is "adamw" on rank 0, '
        '"adafactor" on rank 1; train.steps is 5 on rank 0, 6 on rank 1. Start all ranks with the same'
    )
    assert status == ("failed", 2) and not (tmp_path / "run" / "metrics.jsonl").exists()


def test_an_error_that_all_ranks_meet_is_one_sentence_which_torchrun_repeats_as_the_cause(tmp_path):
    missing = tmp_path / "missing"
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", free_port()]
    command = [*torchrun, "-m", "lengthwise", "train", f"data.index={missing}", f"run_folder={tmp_path / 'run'}"]
    Command(*command, out=tmp_path / "out", err=tmp_path / "err").wait(timeout=120)
    printed = (tmp_path / "err").read_text()
    sentence = f"no index at {missing}; make one with: lengthwise index SRC --out {missing}"
    assert printed.count(f"error: {sentence}\n") == 1 and "stopped by SIGTERM" not in printed
    assert f"traceback : {sentence}" in printed.partition("Root Cause")[2]


@pytest.mark.deep
def test_ranks_whose_indexes_have_the_same_lengths_and_other_tokens_are_refused(end, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    for number in range(24):
        (other / f"{number:02}.txt").write_text(f"file {number} says HELLO. " * (1 + number * number // 8))
    from tests.cli.runs import lengthwise

    lengthwise("index", other, "--out", tmp_path / "corpus-index")
    message, status = end("--rank-1", f"data.index={tmp_path / 'corpus-index'}")
    assert "data.digest is " in message and "some_tokens is " in message and "model.weights" not in message
    assert status == ("failed", 2)


@pytest.mark.deep
@pytest.mark.parametrize(
    ("what", "reason", "status"),
    [
        ("loops", "rank 1 did not come, it is at step 2, plan for", ("crashed", 1)),
        ("is stopped", "no answer from rank 1 (killed, stopped, or cut off)", ("crashed", 1)),
        ("is slow", "rank 1 did not come, it is at step 2, plan for", ("crashed", 1)),
    ],
)
def test_a_rank_that_does_not_come_to_a_collective_is_named_when_the_time_is_over(end, what, reason, status):
    message, told = end(fault=f"1:2:{what}", num_ranks=3)
    assert f"was not over within {TIMEOUT_S} s: {reason}" in message and message.startswith("step 2, ")
    assert "train.timeout_s" in message and told == status


@pytest.mark.deep
@pytest.mark.parametrize("what", ["is killed", "exits at once"])
def test_a_rank_that_is_gone_is_named_at_once(end, what):
    message, status = end(fault=f"1:2:{what}", num_ranks=3)
    assert message.startswith("step 2, ") and "lost a rank: no answer from rank 1" in message
    assert status == ("crashed", 1)


@pytest.mark.deep
@pytest.mark.parametrize(
    ("what", "message", "status"),
    [
        ("raises", "ZeroDivisionError: something is wrong", ("crashed", 1)),
        ("refuses", "the data is not what it was", ("failed", 4)),
        ("exits", "a rank left with sys.exit(0) before the run was done", ("failed", 1)),
    ],
)
def test_the_error_of_the_rank_that_failed_is_told_and_not_that_of_those_who_waited(end, what, message, status):
    told, ended = end(fault=f"1:2:{what}", num_ranks=3)
    assert told == message and ended == status


@pytest.mark.deep
def test_ranks_that_do_not_start_in_time_are_named(end):
    message, status = end(fault="1:-1:is slow")
    assert message.startswith(f"rank 1 of 2 did not start within {TIMEOUT_S} s") and status == ("crashed", 1)
