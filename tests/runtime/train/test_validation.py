"""Validation: its loss is that of one device under any plan, it changes nothing, and it stops training early."""

import random
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lengthwise.core.batch import GlobalBatch
from lengthwise.core.errors import InputError, Preempted
from lengthwise.core.run_folder import RunFolder
from lengthwise.runtime.models.registry import build_model
from lengthwise.runtime.state import checkpoint
from lengthwise.runtime.train.text_samples import TextSampling
from lengthwise.runtime.train.validation import Validation, validation_loss
from tests.runtime.train.runs import RandomTokens, local_world, master_weights, new_state, whole_batch_loss
from tests.runtime.train.test_trainer import Stop, make_trainer, run_whole
from tests.sim.random_plans import SPEC, random_batch, random_plan

EXACT = 1e-10
"""float64: sums in another order differ by rounding alone."""
NUM_BATCHES = 5
FROZEN = {"lr": 1e-30}
"""A learning rate at which no loss changes, so that the first validation is the best."""


def batches(seed: int) -> list[GlobalBatch]:
    rng = random.Random(seed)
    return [random_batch(rng, step) for step in range(NUM_BATCHES)]


def reference(seed: int) -> float:
    """Mean over all targets of all batches, on one device."""
    model = build_model(SPEC, dtype=torch.float64, seed=1)
    sums = [whole_batch_loss(model, batch).item() * max(1, batch.num_targets) for batch in batches(seed)]
    return sum(sums) / sum(max(1, batch.num_targets) for batch in batches(seed))


def loss_on_ranks(seed: int) -> tuple[float, bool, bool]:
    """The loss; whether weights and pushed gradients, and the generator, are as they were."""
    world = local_world()
    model, state = new_state(world, torch.float64)
    before, generator = state.master.clone(), torch.get_rng_state()
    rng = random.Random(seed)
    plans = [random_plan(rng, batch, world.size) for batch in batches(seed)]
    lengths = {id: length for batch in batches(seed) for id, length in zip(batch.ids, batch.lengths)}
    found = validation_loss(plans, model, state, RandomTokens(lengths))
    is_same = torch.equal(state.master, before) and not state.pushed.any() and not state.gradients.any()
    return found, is_same, torch.equal(torch.get_rng_state(), generator)


@pytest.mark.parametrize("num_ranks", [2, *(pytest.param(n, marks=pytest.mark.deep) for n in (1, 4))])
def test_the_loss_under_any_plans_is_that_of_one_device_and_changes_nothing(ranks, num_ranks):
    """Random plans have any degree, method, number of stages and phases."""
    for seed in range(3):
        for loss, is_same, same_draws in ranks(num_ranks).run(loss_on_ranks, seed):
            assert loss == pytest.approx(reference(seed), rel=EXACT)
            assert is_same and same_draws


def make_validated(path: str, *, every: int = 3, patience: int | None = None, lr: float = 1e-2, **settings):
    """The trainer of other tests, with a validation set of its own."""
    trainer = make_trainer(path, **settings)
    trainer.config = trainer.config.model_copy(
        update={"optim": trainer.config.optim.model_copy(update={"lr": lr, "weight_decay": 0.0})}
    )
    rng, drawn = random.Random(5), batches(5)[:2]
    plans = [random_plan(rng, batch, trainer.world.size) for batch in drawn]
    lengths = {id: length for batch in drawn for id, length in zip(batch.ids, batch.lengths)}
    trainer.validation = Validation(plans=lambda: plans, source=RandomTokens(lengths), every=every, patience=patience)
    return trainer


def run_validated(path: str, **settings) -> dict[str, torch.Tensor]:
    trainer = make_validated(path, **settings)
    trainer.fit()
    return master_weights(trainer.state)


def validations(path: Path) -> dict[int, float]:
    rows = RunFolder(path).read_metrics()
    return {row["step"] + 1: row["val/loss"] for row in rows if "val/loss" in row}


@pytest.mark.deep
def test_a_validated_run_is_trained_as_one_that_is_not(ranks, tmp_path):
    expected = ranks(2).run(run_whole, str(tmp_path / "plain"))[0]
    found = ranks(2).run(_run_with_decay, str(tmp_path / "validated"))[0]
    assert all(torch.equal(weight, found[name]) for name, weight in expected.items())
    assert list(validations(tmp_path / "validated")) == [3, 6, 8]


def _run_with_decay(path: str) -> dict[str, torch.Tensor]:
    trainer = make_validated(path)
    trainer.config = make_trainer(path).config
    trainer.fit()
    return master_weights(trainer.state)


@pytest.mark.parametrize(("every", "steps"), [(0, [6, 8]), pytest.param(5, [5, 8], marks=pytest.mark.deep)])
def test_it_comes_every_so_many_steps_or_after_each_epoch_and_at_the_end(ranks, tmp_path, every, steps):
    """An epoch has six batches."""
    ranks(1).run(run_validated, str(tmp_path), every=every)
    assert list(validations(tmp_path)) == steps


SHORT = {"steps": 6, "every": 2}


@pytest.fixture(scope="module")
def undisturbed(ranks, tmp_path_factory):
    path = tmp_path_factory.mktemp("whole")
    return path, ranks(2).run(run_validated, str(path), **SHORT)[0]


@pytest.mark.deep  # by default: tests/cli/test_any_family.py, and the state below
@pytest.mark.parametrize(
    "way",
    [(6, True), *(pytest.param(way, marks=pytest.mark.deep) for way in ((4, False), (4, True), (3, False), (2, True)))],
)
def test_a_run_that_is_stopped_and_resumed_validates_as_one_that_is_not(ranks, undisturbed, tmp_path, way):
    """Stopped after a step, or within its validation, of which nothing counts before it comes again."""
    (whole, expected), parts = undisturbed, tmp_path
    found = ranks(2).run(_stop_and_resume, str(parts), *way)[0]
    assert all(torch.equal(weight, found[name]) for name, weight in expected.items())
    assert validations(parts) == validations(whole) and list(validations(whole)) == [2, 4, 6]
    states = [checkpoint.read_state(path / "checkpoints" / "step_00000006")["validation"] for path in (whole, parts)]
    assert states[0] == states[1]
    assert states[0]["best_loss"] == min(validations(whole).values())


def _stop_and_resume(path: str, stop_after: int, is_validating: bool) -> dict[str, torch.Tensor]:
    trainer = make_validated(path, **SHORT)
    if trainer.world.is_first and is_validating:
        trainer.on_validation = Stop(stop_after).on_step
    elif trainer.world.is_first:
        trainer.callbacks = [Stop(stop_after)]
    with pytest.raises(Preempted, match="in the validation after step" if is_validating else "before step"):
        trainer.fit()
    assert RunFolder(Path(path)).read_metrics()[-1]["step"] + 1 == trainer.next_step == stop_after
    assert max(validations(Path(path)), default=0) == (stop_after - 2 if is_validating else stop_after // 2 * 2)
    trainer = make_validated(path, **SHORT)
    trainer.resume(checkpoint.latest(Path(path) / "checkpoints"))
    assert trainer.next_step == stop_after
    trainer.fit()
    return master_weights(trainer.state)


def test_training_stops_when_patience_ends_and_the_best_checkpoint_stays_by_its_name(ranks, tmp_path):
    options = {"every": 1, "patience": 3, "keep_checkpoints": 1, "checkpoint_every": 0, "steps": 6, **FROZEN}
    ranks(2).run(run_validated, str(tmp_path), **options)
    assert list(validations(tmp_path)) == [1, 2, 3, 4]
    folder = tmp_path / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == ["best", "latest", "step_00000001", "step_00000004"]
    assert (folder / "best").read_text() == "step_00000001\n"
    saved = (folder / "step_00000004" / "state.json").stat().st_mtime_ns
    ranks(1).run(_resume, str(tmp_path), options)
    assert list(validations(tmp_path)) == [1, 2, 3, 4], "a run that has stopped early is over"
    assert saved == (folder / "step_00000004" / "state.json").stat().st_mtime_ns, "and is not saved again"
    ranks(1).run(_resume, str(tmp_path), {**options, "patience": None})
    assert list(validations(tmp_path)) == list(range(1, 7))


def test_a_run_that_stopped_early_has_samples_of_its_last_step(ranks, tmp_path):
    ranks(1).run(_run_with_samples, str(tmp_path))
    assert [row["step"] for row in RunFolder(tmp_path).read_samples()] == [1, 2]


def make_sampled(path: str, **settings):
    trainer = make_validated(path, every=1, steps=6, **FROZEN, **settings)
    trainer.samples = SimpleNamespace(
        is_due=partial(TextSampling.is_due, SimpleNamespace(every=2)), rows=lambda step, logits_of: [{"step": step - 1}]
    )
    return trainer


def _run_with_samples(path: str) -> None:
    make_sampled(path, patience=2).fit()


def test_a_step_whose_validation_was_cut_short_has_samples_once_the_run_goes_on(ranks, tmp_path):
    ranks(1).run(_stop_in_validation_and_resume, str(tmp_path))
    assert [row["step"] for row in RunFolder(tmp_path).read_samples()] == [1, 3, 5]


def _stop_in_validation_and_resume(path: str) -> None:
    trainer = make_sampled(path)
    trainer.on_validation = Stop(4).on_step
    with pytest.raises(Preempted, match="in the validation after step 4"):
        trainer.fit()
    trainer = make_sampled(path)
    trainer.resume(checkpoint.latest(Path(path) / "checkpoints"))
    trainer.fit()


@pytest.mark.deep
def test_the_best_checkpoint_stays_through_a_part_of_the_run_without_validation(ranks, tmp_path):
    options = {"every": 1, "keep_checkpoints": 1, "checkpoint_every": 1, **FROZEN}
    folder = tmp_path / "checkpoints"
    ranks(1).run(run_validated, str(tmp_path), steps=2, **options)
    for steps, changes in ((4, {"validation": None}), (6, {})):
        ranks(1).run(_resume, str(tmp_path), {**options, "steps": steps}, changes)
        assert (folder / "best").read_text() == "step_00000001\n"
        assert {"step_00000001", f"step_{steps:08}"} <= {path.name for path in folder.iterdir()}
    assert list(validations(tmp_path)) == [1, 2, 5, 6]
    state = checkpoint.read_state(folder / "step_00000006")["validation"]
    assert (state["best_step"], state["num_worse"]) == (1, 3), "as of a run that always had validation"


def _resume(path: str, options: dict, changes: dict | None = None) -> None:
    trainer = make_validated(path, **options)
    for name, value in (changes or {}).items():
        setattr(trainer, name, value)
    trainer.resume(checkpoint.latest(Path(path) / "checkpoints"))
    trainer.fit()


def test_what_a_checkpoint_says_of_validation_is_checked():
    validation = Validation(plans=list, source=RandomTokens({}), patience=2)
    validation.load_state_dict({"best_loss": 2.5, "best_step": 7, "num_worse": 1})
    assert validation.state_dict() == {"best_loss": 2.5, "best_step": 7, "num_worse": 1, "digest": ""}
    assert not validation.should_stop
    validation.load_state_dict({})
    assert validation.state_dict() == {"best_loss": None, "best_step": None, "num_worse": 0, "digest": ""}
    for damaged in (
        {"num_worse": "2"}, {"best_step": 3, "best_loss": None, "num_worse": 0}, {"num_worse": 0, "outstanding": 4},
    ):  # fmt: skip
        with pytest.raises(InputError, match="validation state is damaged"):
            validation.load_state_dict(damaged)


def test_the_lowest_loss_of_another_validation_set_does_not_count(caplog):
    before = Validation(plans=list, source=RandomTokens({}), digest="a", patience=1)
    before.compute(4, lambda plans, source: 2.5)
    same, other = (Validation(plans=list, source=RandomTokens({}), digest=name, patience=1) for name in "ab")
    same.load_state_dict(before.state_dict())
    assert (same.best_loss, same.best_step) == (2.5, 4) and not caplog.records
    other.load_state_dict(before.state_dict())
    assert other.best_step is None and "2.5 after step 4, does not count" in caplog.text
    assert other.kept_step == 4, "whose weights stay"
    again = Validation(plans=list, source=RandomTokens({}), digest="b")
    again.load_state_dict(other.state_dict())
    assert again.best_step is None and again.kept_step == 4
    other.compute(8, lambda plans, source: 7.0)
    assert other.best_step == other.kept_step == 8 and not other.should_stop
    assert "earlier_step" not in other.state_dict()
    without = {name: value for name, value in before.state_dict().items() if name != "digest"}
    other.load_state_dict(without)  # of a version that did not note it
    assert other.best_step == 4
