"""Training through the command line: real processes, real files, real signals."""

import json
import os
import re
import shutil
from itertools import islice
from pathlib import Path

import pytest

from lengthwise.cli.ending import way_on
from lengthwise.cli.launch import LAUNCHER_VARIABLE
from lengthwise.config.run_config import load
from lengthwise.core.batch import Pack
from lengthwise.core.cost import ProfileRow, ProfileTable
from lengthwise.core.errors import InputError
from lengthwise.core.pipeline_config import Method, PipelineConfig, uniform_scheme
from lengthwise.core.planned_micro_batch import PlannedMicroBatch
from lengthwise.core.run_folder import RunFolder
from lengthwise.core.step_plan import Pipeline, StepPlan
from lengthwise.data.corpus import open_corpus
from lengthwise.session.planning import make_sampler
from tests.cli.runs import SMALL_MODEL, lengthwise, make_corpus, settings


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("corpus"))


def test_two_ranks_train_report_and_export(corpus, tmp_path):
    folder = tmp_path / "run"
    arguments = settings(corpus, folder, "train.steps=3", "train.tensorboard=true", "plan.policy=auto")
    arguments += ["train.sample_every=2", "train.sample_prompts=[<b>ab, c]", "train.sample_tokens=3"]
    done = lengthwise("train", *arguments, "--nproc", 2, "--json")
    assert json.loads(done.stdout)["status"]["state"] == "done"
    line = next(line for line in done.stderr.splitlines() if line.startswith("step 3/3"))
    assert done.stderr.count("plans follow data sheets; lengthwise profile CONFIG measures instead") == 1
    for part in ("loss ", "lr ", " tokens/s", "  2x<1>  ", "peak ", "eta "):
        assert part in line
    rows = RunFolder(folder).read_metrics()
    assert all(0 <= row["balance/idle_frac"] < 1 for row in rows)
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert rows[2]["loss/avg"] < rows[0]["loss/avg"]
    ledger = json.loads((folder / "ledger.json").read_text())
    assert ledger["rule"] == "split"
    assert ledger["tokens_in"] == ledger["tokens_out"]
    assert list((folder / "tensorboard").iterdir())
    samples = RunFolder(folder).read_samples()
    assert [(row["step"], row["prompt"]) for row in samples] == [(1, "<b>ab"), (1, "c"), (2, "<b>ab"), (2, "c")]

    lengthwise("report", folder)
    page = (folder / "report.html").read_text()
    assert "<h3>Samples</h3>" in page and "<b>&lt;b&gt;ab</b>" in page
    lengthwise("export", folder, "--out", tmp_path / "hf")
    assert sorted(path.name for path in (tmp_path / "hf").iterdir()) == ["config.json", "model.safetensors"]
    lengthwise("export", folder, "--out", tmp_path / "hf", expected=2)
    lengthwise("train", *arguments, expected=2)  # the folder holds a run already


def test_a_quiet_run_says_only_that_it_is_done_with_a_command_to_copy(corpus, tmp_path):
    folder = tmp_path / "my [bold] run"
    done = lengthwise("train", *settings(corpus, folder, "train.steps=2"), "--quiet")
    assert done.stderr == f"done; next: lengthwise report '{folder}'\n"
    assert len(RunFolder(folder).read_metrics()) == 2
    assert way_on(RunFolder(folder)) == f"Go on with: lengthwise train --resume '{folder}'"
    with pytest.raises(InputError) as refused:
        RunFolder(folder).check_new()
    assert f"go on with --resume '{folder}' if" in str(refused.value)


def test_a_run_that_stops_early_says_so_and_goes_on_as_it_says(corpus, tmp_path):
    folder = tmp_path / "run"
    more = ["train.steps=6", "train.validate_every=1", "train.patience=1", "optim.lr=5", "data.validation_share=0.1"]
    done = lengthwise("train", *settings(corpus, folder, *more))
    last = len(RunFolder(folder).read_metrics())
    words = (
        f"stopped early after step {last} of 6: no lower validation loss in 1 validation (train.patience=1); go on "
        f"with: lengthwise train --resume {folder} train.patience=null"
    )
    assert last < 6 and done.stderr.splitlines()[-2:] == [words, f"done; next: lengthwise report {folder}"]
    assert RunFolder(folder).read_json("status.json")["stopped_early"] == words
    again = lengthwise("train", *words.partition("lengthwise train ")[2].split()).stderr
    assert len(RunFolder(folder).read_metrics()) == 6 and "stopped early" not in again
    assert RunFolder(folder).read_json("status.json").keys() == {"state", "exit_code", "error", "attempt", "safe_step"}


NUM_STEPS, NUM_LAYERS = 5, 4


def options(corpus, folder, *more) -> list[str]:
    given = [f"train.steps={NUM_STEPS}", "train.dtype=float64", "plan.max_tokens=1200", "model.preset=llama-tiny"]
    return settings(corpus, folder, *given, *more)


def losses(corpus, folder, *more) -> list[float]:
    """Of the steps in float64 on two ranks."""
    lengthwise("train", *options(corpus, folder, *more), "--nproc", 2)
    return [row["loss/avg"] for row in RunFolder(folder).read_metrics()]


@pytest.fixture(scope="module")
def dense_losses(corpus, tmp_path_factory) -> list[float]:
    return losses(corpus, tmp_path_factory.mktemp("dense") / "run", "plan.policy=static", "--degree", "1")


@pytest.mark.deep
def test_methods_drawn_at_random_train_as_one_device_does(corpus, tmp_path, dense_losses):
    found = losses(corpus, tmp_path / "random", "plan.policy=static", "--methods", "random", "--degree", "2")
    assert found == pytest.approx(dense_losses, rel=1e-10)
    plans = [json.loads(line) for line in (tmp_path / "random" / "plans.jsonl").read_text().splitlines()]
    drawn = [m["methods"] for plan in plans for pipeline in plan["pipelines"] for m in pipeline["micro_batches"]]
    assert len({tuple(methods) for methods in drawn}) > 1
    assert len({method for methods in drawn for method in methods}) > 2


@pytest.mark.deep
def test_a_policy_that_needs_stages_trains_as_one_device_does_from_the_plans_it_wrote(corpus, tmp_path, dense_losses):
    """No device holds the whole model and the longest sequence."""
    more = ["cluster.name=2xcpu", "cluster.memory_gib=0.036", "plan.max_degree=1"]
    lengthwise("plan", *options(corpus, tmp_path / "run", *more), "--out", tmp_path / "plans.jsonl")
    found = losses(corpus, tmp_path / "run", *more, "--plan", str(tmp_path / "plans.jsonl"))
    assert found == pytest.approx(dense_losses, rel=1e-10)
    assert (tmp_path / "run" / "plans.jsonl").read_text() == (tmp_path / "plans.jsonl").read_text()
    plans = RunFolder(tmp_path / "run").read_plans()
    assert {p.scheme.num_stages for plan in plans.values() for p in plan.pipelines} == {2}


@pytest.mark.deep
def test_the_validation_loss_is_the_same_on_one_rank_and_on_two_stages_of_a_pipeline(corpus, tmp_path):
    more = [
        "data.validation_share=0.2",
        "train.steps=null",
        "train.epochs=1",
        "train.validate_every=6",
        "train.patience=99",
    ]
    staged = ["cluster.name=2xcpu", "cluster.memory_gib=0.036", "plan.max_degree=1"]
    lengthwise("train", *options(corpus, tmp_path / "one", *more))
    done = lengthwise("train", *options(corpus, tmp_path / "two", *more, *staged), "--nproc", 2)
    one, two = (RunFolder(tmp_path / name).read_metrics() for name in ("one", "two"))
    steps = [row["step"] + 1 for row in one if "val/loss" in row]
    assert steps[:-1] == list(range(6, len(one), 6)) and steps[-1] == len(one)
    for row, other in zip(one, two, strict=True):
        assert other["loss/avg"] == pytest.approx(row["loss/avg"], rel=1e-10)
        assert other.get("val/loss") == (pytest.approx(row["val/loss"], rel=1e-10) if "val/loss" in row else None)
    plans = RunFolder(tmp_path / "two").read_plans()
    assert {p.scheme.num_stages for plan in plans.values() for p in plan.pipelines} == {2}
    best = min((row for row in one if "val/loss" in row), key=lambda row: row["val/loss"])["step"] + 1
    assert f"validation after step {best}: loss " in done.stderr
    assert (tmp_path / "two" / "checkpoints" / "best").read_text() == f"step_{best:08d}\n"
    lengthwise("export", tmp_path / "two", "--checkpoint", "best", "--out", tmp_path / "hf")
    lengthwise("report", tmp_path / "two")
    assert "validation loss" in (tmp_path / "two" / "report.html").read_text()
    ledger = json.loads((tmp_path / "one" / "ledger.json").read_text())
    assert ledger["epochs"] == 1 and ledger["tokens_in"] == ledger["tokens_seen"] + ledger["tokens_held_out"]


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "trackio", "mlflow"])
def test_a_tracker_that_is_not_installed_is_missed_before_ranks_are_started(cli, corpus, tmp_path, monkeypatch, name):
    monkeypatch.setattr("lengthwise.cli.train_config.find_spec", lambda name: None)
    code, _, error = cli("train", *options(corpus, tmp_path / "run"), f"train.{name}=true")
    assert code == 2 and f"train.{name} needs {name}, which is not installed: pip install" in error
    assert len(error.splitlines()) == 1 and not (tmp_path / "run").exists()


@pytest.mark.deep
@pytest.mark.skipif(shutil.which("g++") is None, reason="compiling for a CPU needs a C++ compiler")
def test_compiled_training_is_training_and_a_resumed_run_loads_what_was_compiled(corpus, tmp_path, dense_losses):
    folder = tmp_path / "run"
    more = ["plan.policy=packed", "plan.shapes=1", "train.compile=true", "--degree", "2"]
    lengthwise("train", *options(corpus, folder, *more), "--nproc", 2, is_cold=True)
    assert [row["loss/avg"] for row in RunFolder(folder).read_metrics()] == pytest.approx(dense_losses, rel=1e-10)
    compiled = set((folder / "compiler").rglob("*.so"))
    assert compiled
    lengthwise("train", "--resume", folder, f"train.steps={NUM_STEPS + 1}", "--nproc", 2, is_cold=True)
    rows = RunFolder(folder).read_metrics()
    assert [row["compile/recompiles"] for row in rows] == [0] * (NUM_STEPS + 1)
    assert set((folder / "compiler").rglob("*.so")) == compiled
    lengthwise("report", folder)  # which checks the digest of every plan


def by_hand(batch, *pipelines: tuple[tuple[int, ...], PipelineConfig]) -> StepPlan:
    """Every other sequence to every other pipeline, two to a pack; nothing is predicted."""
    places = range(len(batch.ids))
    held = [list(places)[number :: len(pipelines)] for number in range(len(pipelines))]
    return StepPlan(
        step=batch.step,
        policy="by hand",
        pipelines=tuple(
            Pipeline(
                ranks=ranks,
                scheme=scheme,
                micro_batches=tuple(
                    PlannedMicroBatch(
                        pack=Pack(ids=tuple(batch.ids[k] for k in two), lengths=tuple(batch.lengths[k] for k in two)),
                        time_s=0.0,
                        peak_bytes=0,
                    )
                    for two in (mine[at : at + 2] for at in range(0, len(mine), 2))
                ),
            )
            for mine, (ranks, scheme) in zip(held, pipelines)
        ),
        loss_normaliser=batch.num_targets,
        update_s=0.0,
        time_s=0.0,
        lower_bound_s=0.0,
    )


@pytest.mark.deep
def test_plans_written_by_hand_are_executed_as_they_are(corpus, tmp_path, dense_losses):
    """Another strategy at every step, in one JSON document without digests."""
    config = load(None, options(corpus, tmp_path / "run"))
    batches = islice(make_sampler(config, open_corpus(config.data)), NUM_STEPS)
    dense, ring, metp, ulysses = (
        uniform_scheme(NUM_LAYERS, degree=degree, method=method, recomputed=layers)
        for degree, method, layers in (
            (1, Method.DENSE, 0),
            (2, Method.RING, 1),
            (2, Method.METP, 4),
            (2, Method.ULYSSES, 2),
        )
    )
    uneven = PipelineConfig(
        degree=1, stage_layers=(3, 1), methods=(Method.DENSE,) * 4, recompute=(True, False, False, True)
    )
    strategies = [
        [((0, 1), ring)],
        [((1, 0), uneven)],
        [((0, 1), metp)],
        [((1,), dense), ((0,), dense)],
        [((0, 1), ulysses)],
    ]
    documents = [by_hand(batch, *pipelines).to_json() for batch, pipelines in zip(batches, strategies)]
    for document in documents:
        del document["digest"]
    (tmp_path / "plans.json").write_text(json.dumps(documents, indent=1))
    found = losses(corpus, tmp_path / "run", "--plan", str(tmp_path / "plans.json"))
    assert found == pytest.approx(dense_losses, rel=1e-10)
    executed = RunFolder(tmp_path / "run").read_plans()
    assert [[p.scheme for p in executed[step].pipelines] for step in range(NUM_STEPS)] == [
        [scheme for _, scheme in pipelines] for pipelines in strategies
    ]


def test_plans_that_are_not_there_are_missed_before_ranks_are_started(cli, corpus, tmp_path):
    code, _, error = cli("train", *options(corpus, tmp_path / "run"), "--plan", tmp_path / "nowhere.jsonl")
    assert code == 2 and f"cannot read plans from {tmp_path / 'nowhere.jsonl'}" in error
    assert not (tmp_path / "run").exists()
    for change in ("data.index=nowhere", "data.metric=loss", "data.sequences_per_step=3"):
        code, _, error = cli("train", *options(corpus, tmp_path / "run"), "data.order=sorted", change)
        assert code == 2 and error.startswith(("error: ", "data.index is given 2 times")), error
        assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("changes", "code", "message"),
    [
        (["data.index=nowhere"], 2, "nowhere"),
        (["data.over_length=error"], 2, "over data.max_length 600"),
        (["plan.max_tokens=100"], 3, "exceeds plan.max_tokens (100 tokens"),
        (["plan.policy=padded", "plan.batch_size=64", "plan.max_tokens=700"], 3, "Lower plan.batch_size"),
        (["model.preset=llama-tiny", "cluster.memory_gib=0.01"], 3, "a device has 10.2 MiB"),
        (["cluster.name=8xH100-80GB"], 2, "8 devices, not as many as the run has ranks, 1; run with --nproc 8"),
        (["model.vocab_size=100"], 2, "raise model.vocab_size"),
        (["train.device=cuda"], 2, "finds no CUDA device"),
        (["plan.method=metp"], 2, "plan.method=metp needs plan.degree"),
        (["plan.profile={profile}"], 2, "the profile is of model another"),
    ],
)
def test_what_cannot_run_is_refused_with_the_right_exit_code(
    corpus, tmp_path, changes, code, message, monkeypatch, capfd
):
    """In one process, as the only rank torchrun would start."""
    from lengthwise.cli.worker import run_worker
    from lengthwise.config.run_config import load

    class LeftError(Exception):
        pass

    def leave(number):
        raise LeftError(number)

    profile = tmp_path / "profile.json"
    row = ProfileRow(lengths=(9,), time_s=1.0, spread_s=0.0, kept_bytes=1)
    ProfileTable(
        model_digest="another", model_name="another", device="cpu", dtype="float32", recompute=False, num_ranks=1,
        update_s=0.0, rows=(row,),
    ).save(profile)  # fmt: skip
    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    changes = [change.format(profile=profile) for change in changes]
    with pytest.raises(LeftError) as left:
        run_worker(load(None, settings(corpus, tmp_path, *changes)), RunFolder(tmp_path), resume=False)
    assert left.value.args == (code,)
    status = RunFolder(tmp_path).read_json("status.json")
    assert (status["state"], status["exit_code"]) == ("failed", code)
    assert message in status["error"]


def test_plans_of_another_model_are_refused_before_ranks_start(cli, corpus, tmp_path):
    plans, few = tmp_path / "plans.jsonl", ["cluster.name=1xcpu", "model.num_layers=3"]
    code, _, error = cli("plan", *options(corpus, tmp_path / "run"), *few, "--out", plans)
    assert code == 0, error
    code, _, error = cli("train", *options(corpus, tmp_path / "run"), "--plan", plans)
    assert code == 2 and "hold 3 layers, model" in error and not (tmp_path / "run").exists()


def test_a_rank_that_another_launcher_started_prints_the_profile(cli, corpus, tmp_path, monkeypatch):
    command = ["profile", f"data.index={corpus}", *SMALL_MODEL, "--max-length", "256", "--out", tmp_path / "p.json"]
    lengthwise(*command, "--repeats", "1")
    monkeypatch.setattr("lengthwise.cli.commands.profile.measure_as_rank", lambda *_, **__: None)
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(name, value)
    assert json.loads(cli(*command, "--json")[1])["profile"] == str(tmp_path / "p.json")
    monkeypatch.setenv(LAUNCHER_VARIABLE, str(os.getppid()))
    assert cli(*command, "--json") == (0, "", "")


@pytest.mark.deep
def test_a_profile_says_how_well_each_cost_model_predicts_rows_it_has_not_seen(corpus, tmp_path):
    rules = ["data.max_length=256", "data.over_length=split"]
    arguments = [f"data.index={corpus}", *rules, "--out", tmp_path / "p.json", "--repeats", 1]
    document = json.loads(lengthwise("profile", *arguments, "--leave-out", "--json").stdout)
    assert set(document["leave_out"]) == {"analytic", "fitted", "hybrid"}
    assert all(0 <= found["median"] <= found["worst"] for found in document["leave_out"].values())


@pytest.mark.parametrize(
    ("setting", "words"),
    [("plan.degree=2", "number of devices of the run, 1; .*--nproc"), ("plan.method=ulysses", "needs plan.degree")],
)
def test_a_degree_that_ranks_cannot_have_is_refused_before_they_start(cli, corpus, tmp_path, setting, words):
    code, _, error = cli("train", *options(corpus, tmp_path / "run"), setting)
    assert code == 2 and re.search(words, error) and not (tmp_path / "run").exists()
