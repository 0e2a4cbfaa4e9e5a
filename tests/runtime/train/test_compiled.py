"""Training with compiled layers: the weights of training without, no recompile after the warm-up, refusals by name."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from lengthwise.config.run_config import check
from lengthwise.core.batch import GlobalBatch, Pack
from lengthwise.core.errors import InputError
from lengthwise.core.lengths import LengthIndex
from lengthwise.core.pipeline_config import Method, PipelineConfig, WeightPlacement, uniform_scheme
from lengthwise.core.planned_micro_batch import PlannedMicroBatch
from lengthwise.core.run_folder import RunFolder
from lengthwise.core.step_plan import Pipeline, StepPlan
from lengthwise.data.sampler import Sampler
from lengthwise.runtime.compile.compiled_layers import CompiledLayers
from lengthwise.runtime.models.registry import build_model
from lengthwise.runtime.train.executable import check_compiled
from lengthwise.runtime.train.trainer import TrainingLoop
from lengthwise.runtime.train.training_engine import TransformerEngine
from tests.runtime.train.runs import RandomTokens, local_world, master_weights
from tests.sim.random_plans import SPEC

EXACT = 1e-10
"""float64: sums in another order differ by rounding alone."""
STEPS, SIZES = 6, (16, 32, 48)
"""Tokens that a rank holds of a micro-batch."""
LENGTHS = np.random.default_rng(1).integers(1, 25, 40)
METHODS = (Method.DENSE, Method.ULYSSES, Method.RING)


def filled_plan(batch: GlobalBatch) -> StepPlan:
    """Two dense pipelines, or one that two ranks share; packs of two sequences, filled up to a size; some recompute.

    From the fourth step on what layers save is in host memory, and recomputed ones keep what attention gave.
    """
    method = METHODS[batch.step % 3]
    degree = 1 if method is Method.DENSE else 2
    scheme = uniform_scheme(
        SPEC.num_layers, degree=degree, stages=1, method=method, recomputed=SPEC.num_layers * (batch.step % 2),
        offloaded=SPEC.num_layers * (batch.step > 2),
    )  # fmt: skip
    scheme = replace(scheme, keep_attention=batch.step > 2)
    packs = [tuple(range(at, min(at + 2, len(batch.ids)))) for at in range(0, len(batch.ids), 2)]
    held: list[list[PlannedMicroBatch]] = [[] for _ in range(2 // degree)]
    for number, pack in enumerate(packs):
        lengths = tuple(batch.lengths[at] for at in pack)
        size = next(size * degree for size in SIZES if size * degree >= sum(lengths))
        filled = Pack(ids=tuple(batch.ids[at] for at in pack), lengths=lengths, filler=size - sum(lengths))
        held[number % len(held)].append(PlannedMicroBatch(pack=filled, time_s=1.0, peak_bytes=1))
    ranks = [(0,), (1,)] if degree == 1 else [(0, 1)]
    return StepPlan(
        step=batch.step, policy="filled", loss_normaliser=batch.num_targets, update_s=0.0, time_s=1.0,
        lower_bound_s=1.0,
        pipelines=tuple(
            Pipeline(ranks=own, scheme=scheme, micro_batches=tuple(mine)) for own, mine in zip(ranks, held)
        ),
    )  # fmt: skip


def train(
    path: str, sizes: tuple[int, ...] | None, backend: str = "eager", *, steps: int = STEPS
) -> tuple[dict[str, torch.Tensor], list[dict]]:
    """Master weights and metrics of a run; ``sizes``: compiled for, or None to run layers as they are."""
    torch.compiler.reset()  # what other tests compiled in this process
    world = local_world()
    config = check({"train": {"steps": steps, "dtype": "float64"}, "optim": {"lr": 1e-2}})
    trainer = TrainingLoop(
        config=config,
        engine=TransformerEngine(
            build_model(SPEC, dtype=torch.float64, seed=1),
            world,
            config=config,
            spec=SPEC,
            source=RandomTokens(dict(enumerate(LENGTHS.tolist()))),
            compiled=None if sizes is None else CompiledLayers(world.device, sizes, backend=backend),
        ),
        spec=SPEC,
        stream=Sampler(LengthIndex(lengths=LENGTHS), seed=4, sequences_per_step=7),
        planner=filled_plan,
        folder=RunFolder(Path(path)),
        world=world,
    )
    trainer.fit()
    return master_weights(trainer.state), RunFolder(Path(path)).read_metrics()


@pytest.mark.deep
@pytest.mark.parametrize(
    ("backend", "steps"),
    [("eager", 4), *(pytest.param(backend, STEPS, marks=pytest.mark.deep) for backend in ("eager", "aot_eager"))],
)
def test_runs_over_all_sizes_end_at_the_weights_of_layers_as_they_are_without_a_recompile(
    ranks, tmp_path, backend, steps
):
    """In the fourth step what layers save is in host memory."""
    plain = ranks(2).run(train, str(tmp_path / "plain"), None, steps=steps)
    compiled = ranks(2).run(train, str(tmp_path / "compiled"), SIZES, backend, steps=steps)
    for name, expected in plain[0][0].items():
        torch.testing.assert_close(compiled[0][0][name], expected, rtol=EXACT, atol=EXACT)
    rows = compiled[0][1]
    assert [row["compile/recompiles"] for row in rows] == [0] * steps
    assert all(row["data/pad_frac"] > 0 for row in rows)


@pytest.mark.deep
def test_what_the_warm_up_left_out_is_counted_over_ranks(ranks, tmp_path):
    _, rows = ranks(2).run(train, str(tmp_path / "run"), SIZES[1:])[0]
    counts = [row["compile/recompiles"] for row in rows]
    assert sum(counts) == 4, "two halves of one size, on two ranks"


@pytest.mark.parametrize("method", [Method.ULYSSES_Z, Method.METP])
def test_plans_whose_layers_gather_weights_are_refused_by_name(method):
    plan = filled_plan(GlobalBatch(step=1, ids=(0, 1), lengths=(3, 9)))
    check_compiled(plan)
    shared = PipelineConfig(
        degree=2, stage_layers=(4,), methods=(method,) * 4, recompute=(False,) * 4, weights=WeightPlacement.SHARDED
    )
    sharded = replace(plan, pipelines=(replace(plan.pipelines[0], scheme=shared),))
    with pytest.raises(InputError, match=rf"step 1: pipelines\[0\] shares layers by {method}, .* train.compile=false"):
        check_compiled(sharded)
