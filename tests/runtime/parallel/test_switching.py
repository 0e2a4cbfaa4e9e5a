"""Any layer may use any method in any micro-batch: nothing is rebuilt, nothing stays, weights come ahead of use."""

import random
from itertools import pairwise

import pytest
import torch

from lengthwise.core.pipeline_config import Method, WeightPlacement
from lengthwise.runtime.comm.group import AsyncResult, Group
from lengthwise.runtime.parallel import stage_shard as stage
from lengthwise.runtime.parallel.shards import keep_own_rows
from lengthwise.runtime.parallel.weights import GatheredWeights
from tests.runtime.parallel.cases import SHARDED, WHOLE, execution_of, live_bytes, model_of, run, small, whole_group

SPEC = small(num_layers=4)


@pytest.mark.deep
@pytest.mark.parametrize("number", [12, pytest.param(200, marks=pytest.mark.deep)])
@pytest.mark.parametrize(
    "weights", [WeightPlacement.SHARDED, pytest.param(WeightPlacement.WHOLE, marks=pytest.mark.deep)]
)
def test_many_switches_leave_as_many_bytes_as_two(fresh_ranks, weights, number):
    for after_two, after_many in fresh_ranks(2).run(bytes_after_switches, weights, number):
        assert after_two == after_many


def bytes_after_switches(weights, last):
    group, rng = whole_group(), random.Random(1)
    model = model_of(SPEC)
    if weights is WeightPlacement.SHARDED:
        keep_own_rows(model, SPEC, rank=group.rank, degree=group.size)
    for weight in model.parameters():
        weight.grad = torch.zeros_like(weight)
    found = []
    for number in range(1, last + 1):
        methods = rng.choices(SHARDED if weights is WeightPlacement.SHARDED else WHOLE, k=4)
        lengths = [rng.randint(1, 12) for _ in range(rng.randint(1, 3))]
        run(model, group, lengths, methods, weights, recompute=[rng.random() < 0.5 for _ in range(4)])
        if number in (2, last):
            found.append(live_bytes())
    return found


@pytest.mark.parametrize("recompute", [(False,) * 4, (True, False, True, True)], ids=["kept", "recomputed"])
def test_weights_are_on_their_way_before_the_operator_that_needs_them(ranks, recompute):
    for events in ranks(2).run(gather_events, recompute):
        check_ahead(events, num_operators=8, recompute=recompute)


def gather_events(recompute):
    """In order: ("gather", operator) when one is launched, ("use", operator) at every product."""
    events, group = [], whole_group()

    class Recording(GatheredWeights):
        def start(self):
            before = self._coming
            super().start()
            if self._coming is not before:
                events.append(("gather", self.place))

        def tensor(self, name):
            events.append(("use", self.place))
            return super().tensor(name)

    stage.GatheredWeights = Recording
    try:
        model = model_of(SPEC)
        keep_own_rows(model, SPEC, rank=group.rank, degree=group.size)
        run(
            model,
            group,
            (9, 4),
            (Method.ULYSSES_Z, Method.MEGATRON_CZ) * 2,
            WeightPlacement.SHARDED,
            recompute=recompute,
        )
    finally:
        stage.GatheredWeights = GatheredWeights
    return events


def check_ahead(events, *, num_operators, recompute):
    """What is used next was launched before the first use of what is used now; every use has a gather of its own."""
    runs, renewed = [], set()  # (operator, place of its first use since it was gathered)
    for place, (kind, operator) in enumerate(events):
        if kind == "gather":
            renewed.add(operator)
        elif not runs or runs[-1][0] != operator or operator in renewed:
            runs.append((operator, place))
            renewed.discard(operator)
    for number, ((now, since), (following, until)) in enumerate(pairwise(runs), start=1):
        is_loss_between = number == num_operators  # after the last operator's first forward
        if following != now and not is_loss_between:
            last = max(place for place in range(until) if events[place] == ("gather", following))
            assert last < since, f"{following} is used after {now} but was not on its way"
    num_forwards = num_operators + 2 * sum(recompute)
    assert sum(kind == "gather" for kind, _ in events) == num_forwards + num_operators


def test_the_next_shard_is_broadcast_while_one_is_used(ranks):
    for events in ranks(3).run(metp_events):
        starts = [place for place, event in enumerate(events) if event == "broadcast"]
        rings = [place for place, event in enumerate(events) if event == "ring"]
        assert len(starts) == 3
        assert starts[1] < min(rings), "the second shard is on its way before keys and values of the first go round"


def metp_events():
    events, group = [], whole_group()
    broadcast, ring_shift = Group.broadcast, Group.ring_shift

    def recorded(name, call):
        def wrapper(self, *arguments, **options) -> AsyncResult:
            events.append(name)
            return call(self, *arguments, **options)

        return wrapper

    Group.broadcast, Group.ring_shift = recorded("broadcast", broadcast), recorded("ring", ring_shift)
    try:
        spec = small(num_layers=1)
        model = model_of(spec)
        keep_own_rows(model, spec, rank=group.rank, degree=group.size)
        execution = execution_of(model, group, (9, 4), (Method.METP,), WeightPlacement.SHARDED)
        x_tD = torch.randn(len(execution.offsets()), spec.hidden_size, dtype=torch.float64)
        execution.operators(0).attention(x_tD, model.layers[0].attention_weights)
    finally:
        Group.broadcast, Group.ring_shift = broadcast, ring_shift
    return events
