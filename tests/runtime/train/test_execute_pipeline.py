"""Executing operations: weights are there before they are used, gradients leave as soon as they are final, no sooner.

Every gradient here is compared with that of one device on the whole batch.
"""

from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from unittest import mock

import pytest
import torch

from lengthwise.config.optimizer_settings import OptimizerSettings
from lengthwise.core.batch import GlobalBatch, Pack
from lengthwise.core.pass_order import PipelineSchedule
from lengthwise.core.pipeline_config import Method, uniform_scheme
from lengthwise.core.planned_micro_batch import PlannedMicroBatch
from lengthwise.core.step_plan import Pipeline, StepPlan
from lengthwise.runtime.comm.group import AsyncResult, Group
from lengthwise.runtime.state.propagation import UnitRoute
from tests.runtime.train.families import FAMILIES, assert_as_on_one_device, random_case, run_plan
from tests.runtime.train.runs import SETTINGS
from tests.sim.random_plans import SPEC

ADAFACTOR = OptimizerSettings(name="adafactor")


def batch_of(*lengths, spec=SPEC):
    return GlobalBatch(step=0, ids=tuple(range(len(lengths))), lengths=lengths, objective=spec.objective)


def plan_of(batch, *lanes, num_ranks=0):
    """``lanes``: ranks, scheme, packs as positions in the batch, and the phase."""
    pipelines = tuple(
        Pipeline(
            ranks=ranks, scheme=scheme, phase=phase,
            micro_batches=tuple(
                PlannedMicroBatch(
                    pack=Pack(ids=tuple(batch.ids[i] for i in pack), lengths=tuple(batch.lengths[i] for i in pack)),
                    time_s=1.0, peak_bytes=1,
                )
                for pack in packs
            ),
        )
        for ranks, scheme, packs, phase in lanes
    )  # fmt: skip
    plan = StepPlan(
        step=batch.step, policy="by hand", pipelines=pipelines, loss_normaliser=max(1, batch.num_targets),
        update_s=0.0, time_s=1.0, lower_bound_s=1.0, num_devices=num_ranks,
    )  # fmt: skip
    plan.check_covers(batch)
    return plan


def scheme(degree=1, stages=1, method=Method.DENSE, recomputed=0):
    return uniform_scheme(SPEC.num_layers, degree=degree, stages=stages, method=method, recomputed=recomputed)


# ---- weights are never used before they have come


class Late(AsyncResult):
    """Nothing of it is there before it is waited for."""

    is_done = False


@contextmanager
def weights_that_come_when_waited_for():
    """Until then, what a rank computes with is not a number."""
    original = UnitRoute.pull

    def pull(self, own, weights):
        staged = torch.empty_like(weights)
        coming, region = original(self, own, staged), weights[self.region]
        region.fill_(torch.nan)

        def make():
            coming.wait()
            return region.copy_(staged[self.region])

        return Late(make)

    with mock.patch.object(UnitRoute, "pull", pull):
        yield


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.deep] * (name != "tied llama")) for name in FAMILIES]
)
@pytest.mark.parametrize("seeds", [range(2), pytest.param(range(2, 6), marks=pytest.mark.deep)], ids=str)
def test_weights_are_never_used_before_they_have_come(ranks, name, seeds):
    ranks(4).run(_check_poisoned, FAMILIES[name], seeds)


@pytest.mark.parametrize("seeds", [range(3), pytest.param(range(3, 8), marks=pytest.mark.deep)], ids=str)
def test_weights_out_of_order_are_never_used_before_they_have_come(ranks, seeds):
    """Owners of whole parameters send them in another order than the layers': put in place when waited for."""
    ranks(4).run(_check_poisoned, FAMILIES["tied llama"], seeds, ADAFACTOR)


def _check_poisoned(spec, seeds, settings=SETTINGS):
    for seed in seeds:
        batch, plan = random_case(spec, seed, torch.distributed.get_world_size())
        with weights_that_come_when_waited_for():
            found = run_plan(spec, batch, plan, settings=settings)
        assert_as_on_one_device(spec, batch, found)


def test_a_last_stage_waits_for_the_embedding_that_is_its_head(ranks):
    ranks(3).run(_check_tied_stages)


def _check_tied_stages():
    for name in ("tied llama", "gpt", "bert"):
        spec = FAMILIES[name]
        batch = batch_of(9, 4, 6, 1, spec=spec)
        plan = plan_of(batch, ((2, 0, 1), scheme(stages=3), [[0], [1, 3], [2]], 0))
        for poison in (False, True):
            with weights_that_come_when_waited_for() if poison else mock.MagicMock():
                found = run_plan(spec, batch, plan)
            assert_as_on_one_device(spec, batch, found)


# ---- the order of calls


class Recorder:
    """Pulls, pushes, forwards and backwards of layers in the order in which this rank begins them."""

    def __init__(self):
        self.events, self._units = [], {}

    def watch(self, model, state):
        self._state = state
        for number, layer in enumerate(model.layers):
            layer.register_forward_pre_hook(lambda *_, number=number: self.events.append(("forward", number)))
            layer.register_forward_hook(lambda _, __, out, number=number: self._watch_backward(number, out))

    def _watch_backward(self, number, out):
        if out.grad_fn is not None:  # run after all hooks on the tensor, before anything of the layer
            out.grad_fn.register_prehook(lambda _: self.events.append(("backward", number)))

    @contextmanager
    def routes(self):
        pull, push = UnitRoute.pull, UnitRoute.push

        def recorded(name, original):
            def call(route, *arguments):
                self.events.append((name, self._state.routes.units.index(route)))
                return original(route, *arguments)

            return call

        with (
            mock.patch.object(UnitRoute, "pull", recorded("pull", pull)),
            mock.patch.object(UnitRoute, "push", recorded("push", push)),
        ):
            yield


def recorded_run(batch, plan, **options):
    recorder = Recorder()
    with recorder.routes():
        found = run_plan(SPEC, batch, plan, prepare=recorder.watch, **options)
    assert_as_on_one_device(SPEC, batch, found)
    return recorder.events


LANES = {
    "dense": [((0,), scheme(), [[0], [1, 2]], 0), ((1,), scheme(), [[3]], 0)],
    "stages": [((1, 0), scheme(stages=2), [[0], [1, 2], [3]], 0)],
    "recomputed": [((0, 1), scheme(2, 1, Method.RING, recomputed=4), [[0, 1], [2], [3]], 0)],
    "sharded": [((0, 1), scheme(2, 1, Method.ULYSSES_Z), [[0, 1], [2, 3]], 0)],
    "two phases": [
        ((0, 1), scheme(2, 1, Method.METP), [[0], [1]], 0),
        ((0,), scheme(), [[2]], 1),
        ((1,), scheme(), [[3]], 1),
    ],
    "two phases of one stretch": [
        ((0, 1), scheme(2, 1, Method.RING), [[0], [1]], 0),
        ((0,), scheme(), [[2]], 1),
        ((1,), scheme(), [[3]], 1),
    ],
}


@pytest.mark.parametrize("lanes", LANES.values(), ids=LANES)
def test_pulls_are_under_way_before_the_first_forward_and_pushes_before_the_next_layers_backward(ranks, lanes):
    batch = batch_of(9, 4, 6, 7)
    num_stretches = 2 if lanes is LANES["two phases"] else 1
    for events in ranks(2).run(recorded_run, batch, plan_of(batch, *lanes)):
        stretches = split_at_first_pull(events)
        assert len(stretches) == num_stretches
        for stretch in stretches:
            check_order(stretch)


def split_at_first_pull(events):
    starts = [place for place, event in enumerate(events) if event == ("pull", 0)]
    return [events[start:end] for start, end in zip(starts, [*starts[1:], None])]


def check_order(events):
    last_unit = SPEC.num_layers + 1
    units = list(range(last_unit + 1))
    assert events[: len(units)] == [("pull", unit) for unit in units], "all pulls first, in order"
    pushes = [place for place, (kind, _) in enumerate(events) if kind == "push"]
    assert [events[place] for place in pushes] == [("push", unit) for unit in reversed(units)]
    backwards = [place for place, (kind, _) in enumerate(events) if kind == "backward"]
    layers = sorted({layer for kind, layer in events if kind == "backward"})
    last_backward = backwards[-len(layers) :]
    assert [events[place] for place in last_backward] == [("backward", layer) for layer in reversed(layers)]
    if layers[-1] + 1 == SPEC.num_layers:
        assert pushes[0] < last_backward[0], "the output's gradients go before the last layer's backward"
    earlier = backwards[: -len(layers)]
    assert not earlier or earlier[-1] < pushes[0], "nothing goes before the last backward"
    for above, below in pairwise(last_backward):
        unit = events[above][1] + 1
        assert above < events.index(("push", unit)) < below, f"unit {unit} is pushed while the layer below runs"


# ---- what is sent stays as it was until it has come


@pytest.mark.parametrize(
    "schedule",
    [pytest.param(s, marks=[pytest.mark.deep] * (s is PipelineSchedule.GPIPE)) for s in PipelineSchedule],
)
def test_what_is_sent_is_not_written_to_before_it_has_come(ranks, schedule):
    ranks(4).run(_check_unchanged, schedule)


NUM_WATCHED = 3
"""Plans of which every message and push is watched."""


def _check_unchanged(schedule):
    checked = {"message": 0, "push": 0}

    def watched(kind, original, sent_by):
        def call(self, *arguments, **options):
            sent = sent_by(self, *arguments)
            before, pending = sent.clone(), original(self, *arguments, **options)
            wait = pending.wait

            def check():
                checked[kind] += 1
                assert torch.equal(sent, before), f"a {kind} was written to while it was on its way"
                return wait()

            pending.wait = check
            return pending

        return call

    with (
        mock.patch.object(Group, "send", watched("message", Group.send, lambda _, x, to: x)),
        mock.patch.object(
            UnitRoute, "push", watched("push", UnitRoute.push, lambda route, gradients, *_: gradients[route.region])
        ),
    ):
        for seed in range(NUM_WATCHED):
            batch, plan = random_case(SPEC, seed, 4)
            assert_as_on_one_device(SPEC, batch, run_plan(SPEC, batch, plan, schedule=schedule))
    assert checked["push"] >= NUM_WATCHED * (SPEC.num_layers + 2)
    assert checked["message"] or torch.distributed.get_rank() > 0


# ---- exact under any schedule, for any family, with idle ranks and changes within the step


@pytest.mark.deep  # by default: slices under GPipe in test_slices
@pytest.mark.parametrize("num_ranks", [pytest.param(3, marks=pytest.mark.deep), 4])
def test_gpipe_gives_the_gradient_of_one_device(ranks, num_ranks):
    ranks(num_ranks).run(_check_random, "llama", range(3 if num_ranks == 4 else 6), schedule=PipelineSchedule.GPIPE)


@pytest.mark.deep  # weights that come late give it above
@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "llama"])
def test_every_family_gives_the_gradient_of_one_device(ranks, name):
    ranks(4).run(_check_random, name, range(4))


def _check_random(name, seeds, **options):
    spec = FAMILIES[name]
    for seed in seeds:
        batch, plan = random_case(spec, seed, torch.distributed.get_world_size())
        assert_as_on_one_device(spec, batch, run_plan(spec, batch, plan, **options))


PLANS = {
    "fewer micro-batches than stages": [((3, 1, 0, 2), scheme(stages=4), [[0, 1], [2, 3]], 0)],
    "one micro-batch": [((0, 1, 2, 3), scheme(2, 2, Method.ULYSSES), [[0, 1, 2, 3]], 0)],
    "an idle pipeline": [((0, 1), scheme(stages=2), [[0], [1], [2], [3]], 0), ((2, 3), scheme(stages=2), [], 0)],
    "all but one rank idle": [((r,), scheme(), [[0, 1], [2, 3]] if r == 2 else [], 0) for r in range(4)],
    "a rank in no pipeline": [((1, 2), scheme(stages=2), [[0, 1], [2]], 0), ((0,), scheme(), [[3]], 0)],
    "another strategy in the second phase": [
        ((0, 2, 1, 3), scheme(2, 2, Method.METP), [[0], [1]], 0),
        ((3,), scheme(), [], 1),
        ((0, 1, 2), scheme(3, 1, Method.RING), [[2], [3]], 1),
    ],
    "phases listed last to first": [
        *(((r,), scheme(), [[r]] if r < 2 else [], 1) for r in range(4)),
        ((0, 1, 2, 3), scheme(4, 1, Method.ULYSSES), [[2], [3]], 0),
    ],
}


EVERY_PLAN = [
    pytest.param(
        lanes, name, schedule, id=f"{plan}-{name}-{schedule.name}",
        # Any two of the three meet in the others already.
        marks=[pytest.mark.deep] if (number + place + later) % 3 else [],
    )
    for number, (plan, lanes) in enumerate(PLANS.items())
    for place, name in enumerate(["tied llama", "gpt", "bert"])
    for later, schedule in enumerate(PipelineSchedule)
]  # fmt: skip


@pytest.mark.first_cells(6)
@pytest.mark.parametrize(("lanes", "name", "schedule"), EVERY_PLAN)
def test_plans_with_idle_ranks_few_micro_batches_and_phases_are_exact(ranks, lanes, name, schedule):
    spec = FAMILIES[name]
    batch = batch_of(9, 4, 1, 7, spec=spec)
    ranks(4).run(_check_plan, spec, batch, plan_of(batch, *lanes, num_ranks=4), schedule)


def _check_plan(spec, batch, plan, schedule):
    assert_as_on_one_device(spec, batch, run_plan(spec, batch, plan, schedule=schedule))


def test_padding_and_recompute_per_micro_batch_do_not_change_the_gradient(ranks):
    batch = batch_of(9, 4, 1, 7)
    plan = plan_of(batch, ((1, 0), scheme(stages=2), [[0, 1], [2, 3]], 0))
    first, second = plan.pipelines[0].micro_batches
    padded = replace(first, pack=replace(first.pack, padded_to=11, rows=4))
    recomputed = replace(second, recompute=(True, False, True, False))
    pipeline = replace(plan.pipelines[0], micro_batches=(padded, recomputed))
    ranks(2).run(_check_plan, SPEC, batch, replace(plan, pipelines=(pipeline,)), PipelineSchedule.ONE_F_ONE_B)
