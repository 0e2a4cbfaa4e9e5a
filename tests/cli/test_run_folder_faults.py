"""Run folders that cannot be used, are in use or are taken away: one sentence, the exit code, nothing left behind."""

import json
import os
import re
import shutil
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from signal import SIGINT, SIGTERM

import pytest

from lengthwise.cli.claim import claimed
from lengthwise.cli.ending import ask_to_stop
from lengthwise.cli.refused_resume import EarlierStatus
from lengthwise.cli.restart import DONE, RUNNING, note_begun, write_status
from lengthwise.core.errors import InputError
from lengthwise.core.lock import Holder
from lengthwise.core.run_folder import RunFolder
from lengthwise.runtime.state.checkpoint import candidates, latest, read_state, verify
from lengthwise.runtime.state.checkpoint_files import _encoded
from tests.cli.runs import Run, lengthwise, make_corpus, settings, wait_until

SMALL = ("plan.policy=static", "data.max_length=200", "data.tokens_per_step=600")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def done(corpus, tmp_path_factory) -> Path:
    """The folder of a run that came to its end."""
    folder = tmp_path_factory.mktemp("done") / "run"
    lengthwise("train", *settings(corpus, folder, *SMALL, "train.steps=4"))
    return folder


@pytest.fixture
def copied(done, tmp_path) -> Path:
    return Path(shutil.copytree(done, tmp_path / "copy"))


def refusal(cli, *arguments) -> str:
    """The one sentence with which a command is refused, without a traceback and before ranks are started."""
    code, _, stderr = cli(*arguments)
    assert code == 2, stderr
    assert stderr.startswith("error: ") and stderr.count("\n") == 1 and "Traceback" not in stderr
    return stderr


def listing(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.mark.first_cells(3)
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("file", "Not a directory"),
        ("file/run", "Not a directory"),
        ("n" * 300, "File name too long"),
        ("loop/run", "Too many levels of symbolic links"),
        ("dangling", "Not a directory|File exists|No such file"),
        ("/proc/run", "No such file or directory"),
    ],
)
@pytest.mark.parametrize("command", ["train", "export"])
def test_a_folder_that_cannot_be_written_is_refused_and_nothing_is_left_behind(
    cli, corpus, done, tmp_path, name, reason, command
):
    (tmp_path / "file").write_text("not a folder")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    before = listing(tmp_path)
    out = tmp_path / name
    if command == "train":
        told = refusal(cli, "train", *settings(corpus, out, *SMALL))
    else:
        told = refusal(cli, "export", done, "--out", out)
        reason += "|is a file|is a symbolic link"
    assert any(words in told for words in reason.split("|")), told
    assert listing(tmp_path) == before


def test_a_run_that_goes_on_is_not_told_to_name_another_folder(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    refused = pytest.raises(InputError, match=r"cannot be written .*: make it writable, or cp -r .* COPY and resume")
    with refused, claimed(RunFolder(tmp_path / "file" / "run"), is_new=False):
        pass


def test_a_disk_without_a_byte_left_is_noticed_before_ranks_are_started(cli, corpus, tmp_path, monkeypatch):
    def refuse(*arguments, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    told = refusal(cli, "train", *settings(corpus, tmp_path / "a" / "b", *SMALL))
    assert "cannot be written (No space left on device)" in told
    assert not listing(tmp_path)


@pytest.mark.parametrize("name", ["checkpoints", "timeline"])
def test_a_file_where_checkpoints_are_to_be_written_is_noticed_before_the_first_one(cli, corpus, tmp_path, name):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).write_text("?")
    assert f"{name} is a file" in refusal(cli, "train", *settings(corpus, tmp_path / "run", *SMALL))


@pytest.mark.parametrize(("out", "reason"), [("{tmp}", "is a folder"), ("{tmp}/file/profile.json", "Not a directory")])
def test_a_profile_that_could_not_be_written_is_not_measured(cli, corpus, tmp_path, out, reason):
    (tmp_path / "file").write_text("?")
    out = out.format(tmp=tmp_path)
    assert reason in refusal(cli, "profile", *settings(corpus, tmp_path / "run", *SMALL), "--out", out)


def test_a_stop_that_cannot_be_asked_for_is_told_and_ends_nobody(tmp_path):
    refused = ask_to_stop(RunFolder(tmp_path / "gone"), by=SIGTERM)
    assert "cannot be asked to stop (No such file or directory: " in refused


def test_what_a_stop_does_is_told_as_it_is_for_the_signal_and_the_moment(tmp_path):
    folder = RunFolder(tmp_path)
    starting = "stopping while ranks start; no step has begun, so there is nothing to save"
    assert {ask_to_stop(folder, by=number) for number in (SIGTERM, SIGINT)} == {starting}
    write_status(folder, RUNNING)
    assert ask_to_stop(folder, by=SIGTERM) == starting
    note_begun(folder)
    training = "stopping after the step, or the batch of a validation, in flight, with a checkpoint"
    assert ask_to_stop(folder, by=SIGTERM) == training
    assert ask_to_stop(folder, by=SIGINT) == f"{training}; Ctrl-C once more ends it at once, without saving"
    note_begun(folder, has_trained=True)
    assert ask_to_stop(folder, by=SIGINT) == "the last step is done; the run ends when its last checkpoint is complete"
    write_status(folder, DONE, exit_code=0)
    assert ask_to_stop(folder, by=SIGINT) == "the run is over, and its processes end by themselves"


def harm(run: Path, what: str) -> None:
    checkpoints = run / "checkpoints"
    match what:
        case "empty":
            shutil.rmtree(run)
            run.mkdir()
        case "file":
            shutil.rmtree(run)
            run.write_text("not a folder")
        case "missing":
            shutil.rmtree(run)
        case "config.yaml is cut off":
            (run / "config.yaml").write_text((run / "config.yaml").read_text()[:40] + "\n  - {")
        case "config.yaml is binary":
            (run / "config.yaml").write_bytes(b"\xff\xfe\x00")
        case "no checkpoint":
            shutil.rmtree(checkpoints)
        case "checkpoints is a file":
            shutil.rmtree(checkpoints)
            checkpoints.write_text("?")
        case "checkpoints is a link to nothing":
            shutil.rmtree(checkpoints)
            checkpoints.symlink_to(run / "nothing")
        case "half a checkpoint":
            for path in checkpoints.glob("step_*"):
                (path / "state.json").unlink()
        case "latest names nothing":
            (checkpoints / "latest").write_text("step_00000099\n")
        case "latest is binary":
            (checkpoints / "latest").write_bytes(b"\xff\xfe\x00")


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("empty", "is not a run folder"),
        ("file", "is not a run folder"),
        ("missing", "is not a run folder"),
        ("config.yaml is cut off", "config.yaml"),
        ("config.yaml is binary", "config.yaml"),
        ("no checkpoint", "no complete checkpoint"),
        ("checkpoints is a file", "where a run has a folder"),
        ("checkpoints is a link to nothing", "where a run has a folder"),
        ("half a checkpoint", "no complete checkpoint"),
        ("latest names nothing", "--fall-back"),
        ("latest is binary", "--fall-back"),
    ],
)
def test_what_cannot_be_resumed_is_refused_at_once_and_stays_as_it_is(cli, copied, what, reason):
    harm(copied, what)
    before = listing(copied)
    code, _, stderr = cli("train", "--resume", copied, "train.steps=6")
    assert code == 2 and reason in stderr and "Traceback" not in stderr
    assert listing(copied) == before


@pytest.mark.parametrize("name", ["metrics.jsonl", "plans.jsonl", "timeline/rank_00000.jsonl"])
@pytest.mark.parametrize(
    ("line", "words"),
    [(b"\0\0\0\n", "damaged"), (b"[1]\n", "an object"), (b'{"step": -1}\n', "-1"), (b"\n", "damaged")],
)
def test_a_damaged_record_is_refused_at_resume_with_its_file_and_line(cli, copied, name, line, words):
    path = copied / name
    lines = path.read_bytes().splitlines(keepends=True)
    content = b"".join([*lines[:1], line, *lines[1:]])
    path.write_bytes(content)
    told = refusal(cli, "train", "--resume", copied, "train.steps=6")
    assert f"{path}:2 is damaged" in told and words in told and "delete that line" in told
    assert path.read_bytes() == content


def test_a_record_that_a_kill_cut_off_is_no_damage(copied):
    with (copied / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 4, "loss')
    RunFolder(copied).check_records()


@pytest.mark.parametrize("override", ["run_folder=elsewhere", "name=other", "output=elsewhere"])
def test_a_resumed_run_is_not_moved_or_renamed_by_its_configuration_alone(cli, copied, override):
    assert f"error: {override}: --resume goes on in" in refusal(cli, "train", "--resume", copied, override)


def test_a_run_resumed_from_another_folder_says_where_it_was_started(cli, corpus, copied, tmp_path, monkeypatch):
    file = copied / "provenance.json"
    document = json.loads(file.read_text())
    assert document["starts"][-1]["folder"] == str(Path.cwd())
    document["starts"][-1]["folder"] = str(corpus.parent)
    file.write_text(json.dumps(document))
    monkeypatch.chdir(tmp_path)
    for setting in ("data.index", "data.validation", "plan.profile"):
        message = refusal(cli, "train", "--resume", copied, f"{setting}={corpus.name}")
        assert f"{setting}: no {corpus.name} in the current folder, {tmp_path}; the run was started in" in message
        assert f"go there (cd {corpus.parent}), or give {setting}={corpus}" in message


def test_a_resumed_run_of_which_nothing_is_left_keeps_its_record(copied):
    before, stamps = contents(copied), modified(copied)
    kept = [f"run_folder={copied}", "name=run", "train.keep_checkpoints=9999999", "train.tensorboard=true"]
    told = lengthwise("train", "--resume", copied, "train.steps=3", "optim.lr=1", *kept).stderr
    assert "nothing is left to train: 4 of train.steps=3 steps are done" in told
    assert "warning" not in told, "of no room for checkpoints, as there are none to come"
    assert contents(copied) == before and modified(copied) == stamps


def modified(folder: Path) -> dict[str, int]:
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "status.json"]
    return {str(path): path.stat().st_mtime_ns for path in files}


def contents(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in listing(folder) if (folder / name).is_file()}


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("data.tokens_per_step=77", r"data\.tokens_per_step is 77 and was \d+ when the run in .* began"),
        ("data.order=sorted", r"error: data\.order is sorted and was shuffled when"),
        (
            "data.validation_share=0.4",
            r"error: data\.validation_share is 0\.4 and was not set when.* without the change",
        ),
        ("seed=5", r"error: seed is 5 and was 0 when the run"),
        ("optim.name=sgd", "holds the state of adamw, this run has optim.name=sgd"),
    ],
)
def test_settings_that_a_checkpoint_is_not_of_are_refused_before_ranks_start(cli, copied, override, words):
    before = contents(copied)
    assert re.search(words, refusal(cli, "train", "--resume", copied, "train.steps=6", override))
    assert contents(copied) == before


def test_a_resume_that_would_round_master_weights_is_refused_before_ranks_start(cli, copied):
    file = latest(copied / "checkpoints") / "state.json"
    file.write_text(_encoded({**read_state(file.parent), "master_dtype": "float64"}))
    before = contents(copied)
    for override in ("train.steps=4", "train.dtype=bfloat16"):
        told = refusal(cli, "train", "--resume", copied, override)
        assert "in float64, this run would round them to float32; set train.dtype as when it was saved" in told
    assert contents(copied) == before


def test_a_resume_that_ranks_refuse_leaves_how_the_run_ended(copied):
    before = contents(copied)
    refused = lengthwise("train", "--resume", copied, "train.steps=6", "model.ffn_size=96", expected=2)
    assert "resume with the settings model.* of the run that saved it" in refused.stderr
    assert contents(copied) == before and json.loads(before["status.json"])["state"] == "done"


def test_the_status_of_a_run_comes_back_only_where_nothing_was_trained_since(copied):
    status = copied / "status.json"
    earlier, before = EarlierStatus(RunFolder(copied)), status.read_bytes()
    status.unlink()  # as by Ctrl-C before ranks have met
    earlier.put_back()
    assert status.read_bytes() == before
    for state, is_kept in (("preempted", True), ("failed", False)):
        status.write_text(json.dumps({"state": state}))
        earlier.put_back()
        assert (json.loads(status.read_text())["state"] == state) == is_kept
    with (copied / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4}')
    status.write_text('{"state": "failed"}')
    earlier.put_back()
    assert json.loads(status.read_text()) == {"state": "failed"}


def test_a_run_whose_checkpoints_are_all_damaged_is_refused_with_their_names(copied):
    for path in candidates(copied / "checkpoints"):
        file = max(path.glob("*.distcp"), key=lambda file: file.stat().st_size)
        file.write_bytes(file.read_bytes()[:-9])
    refused = lengthwise("train", "--resume", copied, "--fall-back", "train.steps=6", expected=2)
    assert "All of step_00000004, step_00000002 are damaged" in refused.stderr and "Traceback" not in refused.stderr
    assert "beside it" not in refused.stderr


def test_a_damaged_checkpoint_costs_no_intact_one_its_place(copied):
    damaged, intact = candidates(copied / "checkpoints")
    file = max(damaged.glob("*.distcp"), key=lambda file: file.stat().st_size)
    file.write_bytes(file.read_bytes()[:-9])
    more = ("train.keep_checkpoints=2", "train.checkpoint_every=0")
    told = lengthwise("train", "--resume", copied, "--fall-back", "train.steps=5", *more).stderr
    assert f"left as they are, until the run saves the same step: {damaged.name}; the run does not go on from" in told
    assert [path.name for path in candidates(copied / "checkpoints")] == ["step_00000005", damaged.name, intact.name]
    lengthwise("train", "--resume", copied, "train.steps=6", *more)
    kept = candidates(copied / "checkpoints")
    assert [path.name for path in kept] == ["step_00000006", "step_00000005", damaged.name]
    verify(kept[1])


@pytest.mark.parametrize("left", ["checkpoints", "metrics.jsonl"])
def test_a_folder_that_lost_its_config_is_not_gone_on_with_under_other_settings(cli, corpus, copied, left):
    (copied / "config.yaml").unlink()
    if left == "metrics.jsonl":
        shutil.rmtree(copied / "checkpoints")
    told = refusal(cli, "train", *settings(corpus, copied, *SMALL, "train.steps=6"))
    assert f"holds {left} of a run whose config.yaml is gone" in told


@pytest.mark.parametrize(
    ("out", "reason"),
    [
        ("{run}", "is not empty"),
        ("{run}/exported", "is inside the run folder"),
        ("{run}/checkpoints/x", "is inside the run folder"),
        ("{other}", "is not empty"),
        ("{link}", "is a symbolic link"),
        ("{other}/file", "is a file"),
    ],
)
def test_an_export_harms_nothing_that_is_there(cli, copied, tmp_path, out, reason):
    other, link = tmp_path / "other", tmp_path / "link"
    other.mkdir()
    (other / "file").write_text("precious")
    link.symlink_to(other)
    before = listing(tmp_path)
    told = refusal(cli, "export", copied, "--out", out.format(run=copied, other=other, link=link))
    assert reason in told
    assert listing(tmp_path) == before


@pytest.mark.parametrize("name", ["../../etc", "step_00000099", "latest", "", "/"])
def test_only_complete_checkpoints_of_the_run_are_exported(cli, copied, tmp_path, name):
    if name:
        told = refusal(cli, "export", copied, "--out", tmp_path / "out", "--checkpoint", name)
        assert "is no complete checkpoint in" in told and "step_00000004" in told
        assert not (tmp_path / "out").exists()
    else:
        assert cli("export", copied, "--out", tmp_path / "out", "--checkpoint", name)[0] == 0


@pytest.mark.parametrize("name", ["model.json", "corpus.json"])
@pytest.mark.parametrize("content", [b"{", b"[]", b"{}", b"\xff", None])
def test_a_run_with_a_damaged_description_is_not_exported(cli, copied, tmp_path, name, content):
    (copied / name).unlink()
    if content is not None:
        (copied / name).write_bytes(content)
    told = refusal(cli, "export", copied, "--out", tmp_path / "out")
    assert name in told
    assert not (tmp_path / "out").exists()


def test_an_export_onto_a_full_disk_leaves_nothing(cli, copied, tmp_path, monkeypatch):
    def refuse(*arguments, **options):
        raise OSError(28, "No space left on device", str(arguments[1]))

    monkeypatch.setattr("safetensors.torch.save_file", refuse)
    code, _, stderr = cli("export", copied, "--out", tmp_path / "a" / "out")
    assert code == 1
    assert "could not be written (No space left on device: " in stderr and "nothing is left of it" in stderr
    assert not (tmp_path / "a").exists()


@pytest.fixture
def start(corpus):
    """Start a run that goes on for long; what is left of it ends with the test."""
    runs = []

    def start_run(folder, *more, command=("lengthwise", "train")):
        options = settings(corpus, folder, *SMALL, "train.steps=1000", *more)
        runs.append(Run(folder, "-m", *command, *options, num_ranks=1))
        return runs[-1]

    yield start_run
    for run in runs:
        run.kill_everything()


@pytest.mark.deep  # by default: test_claim; a removed folder in tests/runtime/state/test_disk.py
def test_a_folder_in_use_is_refused_to_all_others_until_it_is_removed_under_its_run(start, cli, corpus, tmp_path):
    run = start(tmp_path / "run", "train.checkpoint_every=3")
    wait_until(lambda: candidates(run.folder.checkpoints))
    told = refusal(cli, "train", "--resume", run.folder.path)
    assert f"is in use by a run: process {run.process.pid} on " in told
    assert "already holds a run" in refusal(cli, "train", *settings(corpus, run.folder.path, *SMALL))
    command = ["torch.distributed.run", "--standalone", "-m", "lengthwise", "train", "--resume", run.folder.path]
    bare = Run(tmp_path / "bare", "-m", *command, num_ranks=1)
    code, printed = bare.end()
    assert code == 1 and "error: " in printed and "is in use by a run: process " in printed
    before = len(run.steps())
    run.wait_for(before + 2)
    steps = run.steps()
    assert steps == list(range(len(steps)))  # nobody else wrote among its rows
    assert run.folder.read_json("status.json")["state"] == "running"
    run.folder.path.rename(tmp_path / "trash")  # at once, as nobody writes into what is being removed
    code, printed = run.end()
    assert code == 1 and "Traceback" not in printed
    assert (
        "was removed or moved while the run wrote to it" in printed or "is gone, and its checkpoints with it" in printed
    )
    assert not run.folder.path.exists()


def test_an_index_that_shrinks_under_a_run_ends_it_with_a_sentence(start, corpus, tmp_path):
    index = Path(shutil.copytree(corpus, tmp_path / "index"))
    run = start(tmp_path / "run", f"data.index={index}", "train.checkpoint_every=2", "data.prefetch=0")
    wait_until(lambda: candidates(run.folder.checkpoints))
    os.truncate(index / "tokens.bin", 64)
    os.truncate(index / "offsets.npy", 64)
    os.truncate(index / "lengths.npy", 64)
    code, printed = run.end()
    assert code == 1 and "Traceback" not in printed and "SIGBUS" not in printed
    assert "has 64 bytes instead of" in printed and "the newest is step_" in printed
    status = run.folder.read_json("status.json")
    assert (status["state"], status["exit_code"]) == ("failed", 1)
    assert status["safe_step"] == int(candidates(run.folder.checkpoints)[0].name.removeprefix("step_"))
    assert not list(run.folder.path.glob("*.lock"))


def test_a_kill_before_the_first_checkpoint_says_what_is_lost(start, tmp_path):
    run = start(tmp_path / "run", "train.checkpoint_every=500")
    run.wait_for(2)
    run.kill(0)
    code, printed = run.end()
    assert code == 1
    assert "rank 0 was killed by SIGKILL" in printed
    assert "No checkpoint was complete yet (train.checkpoint_every=500), so the " in printed
    assert "--resume" not in printed.split("error: ")[1]
    status = run.folder.read_json("status.json")
    assert (status["state"], status["safe_step"]) == ("crashed", None) and "SIGKILL" in status["error"]


@pytest.mark.deep
def test_a_folder_may_have_any_name(corpus, tmp_path, cli):
    folder = tmp_path / "a b [red] {x} 'q' ünï-☃ $HOME"
    lengthwise("train", *settings(corpus, folder, *SMALL, "train.steps=2"))
    resumed = lengthwise("train", "--resume", folder, "train.steps=3").stderr
    assert resumed.count(f"goes on from step 2 (checkpoint {folder}/checkpoints/step_00000002)\n") == 1
    assert latest(folder / "checkpoints").name == "step_00000003"
    assert [row["step"] for row in RunFolder(folder).read_metrics()] == [0, 1, 2]
    assert not list(folder.glob("*.lock"))
    assert cli("export", folder, "--out", folder.with_name("out [bold]"))[0] == 0
    assert (folder.with_name("out [bold]") / "config.json").is_file()


@pytest.mark.deep  # by default: locks alone, in tests/core/test_lock.py
def test_a_lock_that_a_run_left_behind_stops_nobody(copied):
    holder = {**Holder.this_process().__dict__, "started": "1"}
    for name in ("launcher", "ranks"):
        (copied / f"{name}.lock").write_text(json.dumps(holder))
    lengthwise("train", "--resume", copied, "train.steps=5")
    assert latest(copied / "checkpoints").name == "step_00000005"
    assert not list(copied.glob("*.lock*"))


@pytest.mark.deep
def test_two_machines_with_folders_of_their_own_are_told_apart_before_a_step(corpus, tmp_path):
    """Two launchers whose working folders differ, and a run_folder that is relative to them."""
    port, runs = 29_517, []
    for number in range(2):
        (tmp_path / f"machine{number}").mkdir()
    launcher = ["torch.distributed.run", "--nnodes", 2, "--nproc-per-node", 1, "--master-addr", "127.0.0.1"]
    before = os.getcwd()
    try:
        for number in range(2):
            os.chdir(tmp_path / f"machine{number}")
            command = [*launcher, "--master-port", port, "--node-rank", number, "-m", "lengthwise", "train"]
            runs.append(
                Run(tmp_path / f"run{number}", "-m", *command, *settings(corpus, Path("run"), *SMALL), num_ranks=1)
            )
            time.sleep(0.2)
    finally:
        os.chdir(before)
    ends = [run.end() for run in runs]
    assert all(code == 1 for code, _ in ends)
    assert "is not one folder for all ranks: rank 1 on " in ends[0][1]
    assert not list(tmp_path.rglob("metrics.jsonl")) and not list(tmp_path.rglob("checkpoints"))


@pytest.fixture
def small_disk(tmp_path):
    """A disk of its own that a few checkpoints fill."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "none", disk], capture_output=True)
    if mounted.returncode:
        pytest.skip("this user may not mount a disk")
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


def test_a_run_whose_disk_fills_ends_with_what_is_safe(small_disk, start, tmp_path):
    (small_disk / "run").mkdir()
    (tmp_path / "run").symlink_to(small_disk / "run")
    run = start(tmp_path / "run", "train.checkpoint_every=1", "train.keep_checkpoints=1")
    wait_until(lambda: candidates(run.folder.checkpoints))
    with suppress(OSError), (small_disk / "filler").open("wb", buffering=0) as file:
        while True:
            file.write(b"0" * (1 << 20))
    code, printed = run.end()
    assert code == 1 and "Traceback" not in printed and "No space left on device" in printed
    newest = latest(run.folder.checkpoints)
    verify(newest)
    assert f"the newest is {newest.name}" in printed and f"lengthwise train --resume {run.folder.path}" in printed
    status = run.folder.read_json("status.json")
    assert (status["state"], status["exit_code"]) == ("failed", 1)
    assert status["safe_step"] == int(newest.name.removeprefix("step_"))
    assert not list(run.folder.checkpoints.glob("*.partial"))
