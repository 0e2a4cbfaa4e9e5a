"""Training through the command line: real processes, real files, real signals."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lengthwise.core.run_folder import RunFolder


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    """A byte-level index of a few small files of very different length."""
    folder = tmp_path_factory.mktemp("corpus")
    for number in range(24):
        (folder / f"{number:02}.txt").write_text(f"file {number} says hello. " * (1 + number * number // 8))
    out = folder.parent / f"{folder.name}-index"
    lengthwise("index", folder, "--out", out)
    return out


def lengthwise(*arguments, expected=0) -> subprocess.CompletedProcess:
    """Run the command line in a process of its own."""
    command = [sys.executable, "-m", "lengthwise", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == expected, done.stderr[-3000:]
    return done


def settings(corpus: Path, folder: Path, *more: str) -> list[str]:
    sizes = ["data.max_length=600", "data.over_length=split", "data.tokens_per_step=2000", "train.checkpoint_every=2"]
    return [f"data.index={corpus}", f"run_folder={folder}", *sizes, *more]


def test_two_ranks_train_report_and_export(corpus, tmp_path):
    folder = tmp_path / "run"
    arguments = settings(corpus, folder, "train.steps=3", "train.tensorboard=true", "plan.policy=auto")
    done = lengthwise("train", *arguments, "--nproc", 2, "--json")
    assert json.loads(done.stdout)["status"]["state"] == "done"
    line = next(line for line in done.stderr.splitlines() if line.startswith("step: 3/3"))
    for part in ("loss: ", "grad_norm: ", "lr: ", "tokens: ", "pad: 0.0%", "imbalance: ", "mfu: n/a", "plan: auto"):
        assert part in line
    rows = RunFolder(folder).read_metrics()
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert rows[2]["loss/avg"] < rows[0]["loss/avg"]
    ledger = json.loads((folder / "ledger.json").read_text())
    assert ledger["rule"] == "split"
    assert ledger["tokens_in"] == ledger["tokens_out"]
    assert list((folder / "tensorboard").iterdir())

    lengthwise("report", folder)
    assert (folder / "report.html").stat().st_size > 10_000
    lengthwise("export", folder, "--out", tmp_path / "hf")
    assert sorted(path.name for path in (tmp_path / "hf").iterdir()) == ["config.json", "model.safetensors"]
    lengthwise("export", folder, "--out", tmp_path / "hf", expected=2)
    lengthwise("train", *arguments, expected=2)  # the folder holds a run already


def losses(corpus, folder, *more) -> list[float]:
    """Of five steps in float64 on two ranks."""
    options = ["train.steps=5", "train.dtype=float64", "plan.policy=static", "plan.max_tokens=1200", *more]
    lengthwise("train", *settings(corpus, folder, *options), "--nproc", 2)
    return [row["loss/avg"] for row in RunFolder(folder).read_metrics()]


@pytest.fixture(scope="module")
def dense_losses(corpus, tmp_path_factory) -> list[float]:
    return losses(corpus, tmp_path_factory.mktemp("dense") / "run", "--degree", "1")


def test_methods_drawn_at_random_train_as_one_device_does(corpus, tmp_path, dense_losses):
    found = losses(corpus, tmp_path / "random", "--methods", "random", "--degree", "2")
    assert found == pytest.approx(dense_losses, rel=1e-10)
    plans = [json.loads(line) for line in (tmp_path / "random" / "plans.jsonl").read_text().splitlines()]
    drawn = [m["methods"] for plan in plans for pipeline in plan["pipelines"] for m in pipeline["micro_batches"]]
    assert len({tuple(methods) for methods in drawn}) > 1
    assert len({method for methods in drawn for method in methods}) > 2


def test_a_method_on_whole_weights_trains_from_the_command_line(corpus, tmp_path, dense_losses):
    found = losses(corpus, tmp_path / "ring", "--method", "ring", "--degree", "2")
    assert found == pytest.approx(dense_losses, rel=1e-10)


def test_a_method_without_a_degree_is_refused(corpus, tmp_path):
    done = lengthwise("train", *settings(corpus, tmp_path / "run"), "--method", "metp", expected=2)
    assert "plan.method=metp needs plan.degree" in done.stderr


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)], ids=["SIGTERM", "Ctrl-C"])
def test_a_stopped_run_saves_itself_and_goes_on(corpus, tmp_path, number, code):
    folder = tmp_path / "run"
    arguments = ["train", *settings(corpus, folder, "train.steps=400"), "--nproc", "2"]
    process = subprocess.Popen(
        [sys.executable, "-m", "lengthwise", *arguments], stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    metrics = RunFolder(folder).metrics
    wait_until(lambda: metrics.is_file() and metrics.read_text().count("\n") >= 3)
    os.killpg(process.pid, number)  # a terminal signals every process of the job
    _, stderr = process.communicate(timeout=100)
    assert process.returncode == code, stderr[-3000:]
    assert "Go on with: lengthwise train --resume" in stderr
    assert "Traceback" not in stderr
    status = RunFolder(folder).read_json("status.json")
    assert (status["state"], status["exit_code"]) == ("preempted", 75)
    assert not RunFolder(folder).stop.exists()
    done = len(RunFolder(folder).read_metrics())

    lengthwise("train", "--resume", folder, f"train.steps={done + 2}", "--nproc", 2)
    assert [row["step"] for row in RunFolder(folder).read_metrics()] == list(range(done + 2))
    assert RunFolder(folder).read_json("status.json")["state"] == "done"


def wait_until(condition, timeout_s=100):
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


def test_a_loss_that_diverges_ends_the_run_with_the_reason(corpus, tmp_path):
    done = lengthwise(
        "train", *settings(corpus, tmp_path / "run", "train.steps=50", "optim.lr=1e30", "optim.clip_norm=0"), expected=1
    )
    assert "are not both finite; weights are unchanged" in done.stderr
    assert "Traceback" not in done.stderr
    assert RunFolder(tmp_path / "run").read_json("status.json")["state"] == "failed"


@pytest.mark.parametrize(
    ("changes", "code", "message"),
    [
        (["data.index=nowhere"], 2, "nowhere"),
        (["data.over_length=error"], 2, "over data.max_length 600"),
        (["plan.max_tokens=100"], 3, "exceeds plan.max_tokens (100 tokens"),
        (["plan.policy=padded", "plan.batch_size=64", "plan.max_tokens=700"], 3, "Lower plan.batch_size"),
        (["cluster.memory_gib=0.01"], 3, "a device has 0.0 GiB"),
        (["cluster.name=8xH100-80GB"], 2, "8 devices, the run has 1 ranks"),
        (["model.vocab_size=100"], 2, "raise model.vocab_size"),
        (["train.device=cuda"], 2, "finds no CUDA device"),
    ],
)
def test_what_cannot_run_is_refused_with_the_right_exit_code(
    corpus, tmp_path, changes, code, message, monkeypatch, capfd
):
    """In one process, as the only rank torchrun would start."""
    from lengthwise.cli.worker import run_worker
    from lengthwise.config import load

    class LeftError(Exception):
        pass

    def leave(number):
        raise LeftError(number)

    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(LeftError) as left:
        run_worker(load(None, settings(corpus, tmp_path, *changes)), RunFolder(tmp_path), resume=False)
    assert left.value.args == (code,)
    status = RunFolder(tmp_path).read_json("status.json")
    assert (status["state"], status["exit_code"]) == ("failed", code)
    assert message in status["error"]


def test_profiles_of_another_model_are_refused(corpus, tmp_path):
    lengthwise("profile", "data.max_length=64", "--out", tmp_path / "p.json", "--repeats", 1)
    arguments = settings(corpus, tmp_path / "run", f"plan.profile={tmp_path / 'p.json'}")
    done = lengthwise("train", *arguments, expected=2)
    assert "the profile is of model llama-tiny" in done.stderr


def test_a_profile_says_how_well_each_cost_model_predicts_rows_it_has_not_seen(corpus, tmp_path):
    rules = ["data.max_length=256", "data.over_length=split"]
    arguments = [f"data.index={corpus}", *rules, "--out", tmp_path / "p.json", "--repeats", 1]
    document = json.loads(lengthwise("profile", *arguments, "--leave-out", "--json").stdout)
    assert set(document["leave_out"]) == {"analytic", "fitted", "hybrid"}
    assert all(0 <= found["median"] <= found["worst"] for found in document["leave_out"].values())
