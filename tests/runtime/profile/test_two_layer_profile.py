"""Two layers are measured as they are, by all ranks alike, and the whole model takes what follows from them."""

import logging
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lengthwise.core.batch import Pack
from lengthwise.core.errors import CheckError, InputError
from lengthwise.core.layer_profile import LayerTable
from lengthwise.core.pipeline_config import Method
from lengthwise.runtime.loop.run import Run
from lengthwise.runtime.loop.synthetic_batches import synthetic
from lengthwise.runtime.profile import probes as gauge
from lengthwise.runtime.profile import trial as bench
from lengthwise.runtime.profile import two_layer_profile as profile
from lengthwise.runtime.profile.fingerprint import find_table
from lengthwise.runtime.profile.measured_packs import FEWEST, ladder, many_short
from lengthwise.runtime.profile.trial import Trial, measure_memory
from lengthwise.runtime.profile.two_layer_profile import ProfilingEffort, measure
from lengthwise.runtime.profile.validate import check_prediction
from lengthwise.runtime.wrap.context import CallCounts, PackShard, active
from tests.cost.profiled.equations import LayerProfile
from tests.runtime.loop.profile_runs import (
    HIDDEN,
    LAYERS,
    VOCABULARY,
    Gpt,
    Limited,
    Limiting,
    Spend,
    Spending,
    llama,
    prepared,
)

QUICK = ProfilingEffort(repeats=2, budget_s=1e9)
KEPT_PER_TOKEN = 4 * (4 * HIDDEN + 3 * HIDDEN + 2 * 4 * HIDDEN + 4 + 2 * 2)
"""Bytes that a layer without dropout keeps beside its input: both norms' outputs, what attention gives and what the
second norm gets; queries, keys and values; the feed-forward's inner layer before and after its activation; a
log-sum-exp per head; two statistics per norm."""
REST_PER_TOKEN = 4 * (2 * HIDDEN + 2 + VOCABULARY) + 3 * 8
"""And all else: the last norm's input and output and its statistics, the softmax of the head's output; the token's id,
its target and its place in the table of positions."""


def run_of(kind: str, **options: object) -> Run:
    torch.manual_seed(0)
    if kind == "gpt without dropout":
        options["dropout"] = 0.0
    return prepared(llama() if kind == "llama" else Gpt(**options))  # type: ignore[arg-type]


def as_equation(table: LayerTable):  # type: ignore[no-untyped-def]
    """Equations 4 to 6 on the row of exactly these lengths."""

    def predict(lengths, degree, recomputed):  # type: ignore[no-untyped-def]
        row = next(row for row in table.rows if (row.lengths, row.degree) == (lengths, degree))
        whole = LayerProfile(
            forward_s=row.forward_s, backward_s=row.backward_s, constant_s=row.constant_s, kept_bytes=row.kept_bytes,
            input_bytes=row.input_bytes, constant_bytes=row.constant_bytes,
        )  # fmt: skip
        return whole.time_s(table.num_layers, recomputed), whole.peak_bytes(table.num_layers, recomputed)

    return predict


def measured_and_whole(kind: str):  # type: ignore[no-untyped-def]
    """The table, the whole model against it at measured lengths, and whether anything was left behind."""
    run = run_of(kind)
    before = [parameter.detach().clone() for parameter in run.model.parameters()]
    progress: list[float] = []
    table = measure(run, longest=64, effort=QUICK, on_progress=progress.append)
    left = [
        any(not torch.equal(one, other) for one, other in zip(before, run.model.parameters())),
        bool(run.state.gradients.any()),
        bool(run.state.optimizer.state),
        run.wrapped_model.layers.computed is not None,
        type(run.wrapped_model.layers.watch) is not gauge.LayerWatch,
        progress != sorted(progress) or progress[-1] != 1.0,
    ]
    predict, rows = as_equation(table), []
    for degrees, packs in ((table.degrees, [(64,)]), ([1], [table.rows[-1].lengths])):
        rows += check_prediction(run, predict, packs=packs, degrees=degrees, recomputed=[0, 2, LAYERS], repeats=1)
    run.close()
    return table, rows, left


def kept() -> LayerTable:
    return measure(run_of("gpt without dropout"), longest=64, effort=ProfilingEffort(repeats=1))


def test_kept_bytes_are_those_that_a_layer_has_to_keep(ranks):
    table, *_ = ranks(1).run(kept)
    for row in table.rows[:-1]:
        assert row.kept_bytes == row.alive_bytes == KEPT_PER_TOKEN * row.num_tokens
        assert row.input_bytes == 4 * HIDDEN * row.num_tokens
        assert row.constant_bytes == REST_PER_TOKEN * row.num_tokens + 4  # the mean's divisor
    mixed = table.rows[-1]
    assert len(set(mixed.lengths)) == 2
    # Attention of sequences of different length is computed one by one and then laid end to end.
    assert mixed.kept_bytes == (KEPT_PER_TOKEN + 4 * HIDDEN) * mixed.num_tokens


@pytest.mark.parametrize("kind", ["gpt", pytest.param("llama", marks=pytest.mark.deep)])
def test_whole_models_keep_exactly_what_two_layers_foretell_and_are_left_as_they_were(ranks, kind):
    found = ranks(2).run(measured_and_whole, kind)
    assert found[0] == found[1]
    table, rows, left = found[0]
    assert not any(left), left
    assert table.degrees == (1, 2)
    assert [(row.degree, len(row.lengths)) for row in rows] == [(1, 1)] * 3 + [(2, 1)] * 3 + [(1, 2)] * 3
    for row in rows:
        assert row.predicted_bytes == row.measured_bytes, row
        assert row.predicted_s > 0
        assert row.measured_s > 0
    assert [link.degree for link in table.links] == [2]
    assert table.update_s > 0
    assert table.num_params == sum(parameter.numel() for parameter in run_parameters(kind))
    assert table.other_bytes > 0


def run_parameters(kind: str) -> list[nn.Parameter]:
    return list((llama() if kind == "llama" else Gpt()).parameters())


def measured_by_spent_seconds() -> tuple[LayerTable, float]:
    """With a clock that only layers and head advance, and each layer otherwise."""
    model = Gpt(num_layers=4, dropout=0.0)
    for number, layer in enumerate(model.layers):
        model.layers[number] = Spending(layer, 3.0 + 10 * (number != 1), 5.0 + 10 * (number != 1))
    model.head = Spending(model.head, 1.0, 2.0)
    run = prepared(model)
    fake = SimpleNamespace(perf_counter=lambda: Spend.now)
    real = [(module, module.time) for module in (bench, gauge, profile)]
    try:
        for module, _ in real:
            module.time = fake
        table = measure(run, longest=64, effort=ProfilingEffort(repeats=2, budget_s=1e6), update_s=7.0)
        cost = sum(row.forward_s + row.backward_s for row in table.rows)
    finally:
        for module, time in real:
            module.time = time
    return table, cost


def test_seconds_are_those_of_the_second_layer_and_of_all_but_layers(ranks):
    (table, _), *_ = ranks(1).run(measured_by_spent_seconds)
    assert {(row.forward_s, row.backward_s, row.constant_s) for row in table.rows} == {(3.0, 5.0, 3.0)}
    assert {row.forward_spread_s for row in table.rows} == {0.0}
    assert {row.repeats for row in table.rows} == {2}
    assert table.update_s == 7.0


def limited_on_rank_1(limit: int, where: str, degree: int) -> tuple[LayerTable, int]:
    """Rank 1 has no memory for more than ``limit`` slots in its second layer."""
    model = Gpt(num_layers=3)
    run_rank = torch.distributed.get_rank()
    limited = Limited(limit * HIDDEN if run_rank == 1 else 1 << 40, where)
    model.layers = nn.ModuleList(Limiting(layer, limited) for layer in model.layers)
    run = prepared(model)
    table = measure(run, longest=96, degrees=[degree], effort=ProfilingEffort(repeats=1, budget_s=1e9))
    assert not run.state.gradients.any()
    return table, limited.most


@pytest.mark.parametrize(
    ("where", "degree"),
    [
        ("backward", 2),
        ("together", 2),
        *(pytest.param(place, 1, marks=pytest.mark.deep) for place in ("forward", "backward", "together")),
        pytest.param("forward", 2, marks=pytest.mark.deep),
    ],
)
def test_ranks_stop_together_where_one_of_them_runs_out_of_memory(ranks, where, degree):
    (table, _), (other, most) = ranks(2).run(limited_on_rank_1, 40, where, degree)
    assert table == other
    longest = {1: 24, 2: 48}[degree]
    assert max(row.num_tokens for row in table.rows) == longest
    assert table.too_large == ((degree, 2 * longest),)
    assert most == 2 * longest // degree * HIDDEN  # it was tried, once


def capped(memory_bytes: int) -> tuple[LayerTable, int]:
    """Rank 1 says how much there is; how many numbers a layer ever had is told."""
    model = Gpt(num_layers=3, dropout=0.0)
    limited = Limited(1 << 40, "forward")
    model.layers = nn.ModuleList(Limiting(layer, limited) for layer in model.layers)
    run = prepared(model)
    mine = memory_bytes if run.world.rank == 1 else None
    table = measure(run, longest=256, degrees=[1], effort=ProfilingEffort(repeats=1, memory_bytes=mine))
    return table, limited.most


def test_packs_that_are_foreseen_not_to_fit_any_one_rank_are_never_tried(ranks):
    per_token = 3 * KEPT_PER_TOKEN + 2 * 4 * HIDDEN + REST_PER_TOKEN  # two layers, and one of them once more
    (table, most), (other, _) = ranks(2).run(capped, 130 * per_token)
    assert table == other
    assert table.too_large == ((1, 256),)
    assert most == 128 * HIDDEN
    assert max(row.num_tokens for row in table.rows) == 128


def hurried(budget_s: float) -> LayerTable:
    """Rank 1 has a clock that runs a thousand times too fast."""
    run = run_of("gpt", num_layers=2)
    if run.world.rank == 1:
        real = profile.time
        profile.time = SimpleNamespace(perf_counter=lambda: 1000 * real.perf_counter())  # type: ignore[assignment]
    try:
        return measure(run, longest=256, degrees=[1, 2], effort=ProfilingEffort(repeats=4, budget_s=budget_s))
    finally:
        if run.world.rank == 1:
            profile.time = real


def test_ranks_whose_clocks_differ_measure_the_same_packs_within_the_budget(ranks):
    one, other = ranks(2).run(hurried, 1.0)
    assert one == other
    assert [len(one.of_degree(degree)) for degree in (1, 2)] == [FEWEST + 1] * 2
    assert {row.repeats for row in one.rows} == {1}


@pytest.mark.deep
def test_ranks_whose_clocks_differ_measure_all_packs_several_times_if_there_is_time(ranks):
    one, other = ranks(2).run(hurried, 1e9)
    assert one == other
    assert {row.repeats for row in one.rows} == {4}
    assert [len(one.of_degree(degree)) for degree in (1, 2)] == [5, 5]


def of_two_in_three() -> LayerTable:
    return measure(run_of("gpt", num_layers=2), longest=40, degrees=[2, 3], effort=ProfilingEffort(repeats=1))


def test_degrees_that_leave_ranks_over_are_measured_all_the_same(ranks):
    found = ranks(3).run(of_two_in_three)
    assert found[0] == found[1] == found[2]
    assert found[0].degrees == (2, 3)


def counts_of_two_layers() -> tuple[CallCounts, CallCounts]:
    """Calls of attention, positions and noise of a whole forward, and of one of two layers."""
    run = run_of("gpt")
    pack, found = Pack(ids=(0,), lengths=(20,)), []
    for computed in (None, frozenset((0, 1))):
        run.wrapped_model.layers.computed = computed
        shard = PackShard(step=0, seed=0, ids=(0,), cu_seqlens=(0, 20), group=run.alone, device=run.world.device)
        with synthetic(run, (20,)), active(shard):
            run.model(**run.make(shard, pack).inputs)
        found.append(shard.counts)
    return found[0], found[1]


def test_calls_after_layers_that_are_left_out_keep_their_numbers(ranks):
    (whole, part), *_ = ranks(1).run(counts_of_two_layers)
    assert part == whole
    assert (whole.attention, whole.positions, whole.noise) == (LAYERS, 1, LAYERS + 1)


def odd_runs() -> tuple[LayerTable, LayerTable, str, str]:
    """A model of one layer; one in half precision that freezes its embeddings; a run under way; an unknown degree."""
    single = measure(run_of("gpt without dropout", num_layers=1), longest=32, effort=QUICK)
    model = Gpt()
    model.tokens.requires_grad_(False)
    half = measure(prepared(model, dtype=torch.bfloat16), longest=32, effort=QUICK)
    run = run_of("gpt", num_layers=2)
    run.state.step(lr=0.0, clip=1.0)
    told = []
    for degrees in ([1], [2]):
        try:
            measure(run, longest=32, degrees=degrees, effort=QUICK)
        except (CheckError, InputError) as error:
            told.append(str(error))
    return single, half, told[0], told[1]


def test_models_of_one_layer_frozen_parameters_and_half_precision_are_measured(ranks):
    (single, half, under_way, unknown), *_ = ranks(1).run(odd_runs)
    assert {row.kept_bytes for row in single.rows[:-1]} == {KEPT_PER_TOKEN * row.num_tokens for row in single.rows[:-1]}
    assert half.identity.dtype == "bfloat16"
    assert half.other_bytes == 2 * VOCABULARY * HIDDEN + 2 * 7
    assert half.num_params + VOCABULARY * HIDDEN == sum(parameter.numel() for parameter in Gpt().parameters())
    assert "before the first one alone" in under_way
    assert "from 1 to the 1 ranks" in unknown


def kept_in(path, changes: list[dict[str, object]]) -> list[tuple[bool, str]]:  # type: ignore[no-untyped-def]
    """Whether each of several runs found its profile in one file, and what was logged."""
    found = []
    log = logging.getLogger("lengthwise")
    for change in changes:
        options = {"longest": 64, "degrees": [1], **change}
        run = run_of("gpt", num_layers=2, dropout=options.pop("dropout", 0.1))
        told: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record, told=told: told.append(record.getMessage())  # type: ignore[method-assign]
        log.addHandler(handler)
        made = []

        def make(run=run, options=options, made=made):  # type: ignore[no-untyped-def]
            made.append(measure(run, effort=ProfilingEffort(repeats=1), **options))
            return made[0]

        table, was_found = find_table(run, path, make, **options)
        log.removeHandler(handler)
        assert was_found == (not made)
        assert not made or made[0] == table
        found.append((was_found, " ".join(told), table))
    return found


@pytest.mark.deep
def test_a_profile_is_measured_again_only_where_it_is_of_something_else(ranks, tmp_path):
    path = tmp_path / "cache" / "gpt.json"
    changes = [
        {},
        {"longest": 70},
        {"longest": 32},
        {"dropout": 0.2},
        {"dropout": 0.2, "degrees": [1, 2]},
        {"longest": 128},
    ]
    changes.insert(5, {**changes[4], "methods": (Method.RING,)})
    one, other = ranks(2).run(kept_in, path, changes)
    assert [found for found, *_ in one] == [False, True, True, False, False, False, False]
    assert [table for *_, table in one] == [table for *_, table in other]
    told = [words for _, words, _ in one]
    assert told[:3] == ["", "", ""]
    assert f"the profile at {path} has model digest" in told[3]
    assert "no degree 2" in told[4]
    assert "no times of ring" in told[5] and one[5][2].shared == ((1, "dense"), (2, "ring"))
    assert "up to 64 tokens instead of 128" in told[6]
    assert not any(words for _, words, _ in other)  # the first rank speaks for all
    assert LayerTable.load(path) == one[-1][2]


def refused(path) -> str:  # type: ignore[no-untyped-def]
    try:
        find_table(run_of("gpt", num_layers=2), path, lambda: pytest.fail("measured"), longest=64, degrees=[1])
    except InputError as error:
        return str(error)
    return "nothing"


def test_a_file_that_is_no_profile_is_refused_by_all_ranks_and_not_written_over(ranks, tmp_path):
    path = tmp_path / "notes.json"
    path.write_text('{"mine": 1}')
    for told in ranks(2).run(refused, path):
        assert "notes.json is no profile of layers (it has no 'kind')" in told
    assert path.read_text() == '{"mine": 1}'


def bytes_of_a_trial_alone() -> tuple[int, int, int]:
    """What a rank holds by itself at degree 2, and how many bytes it sent for that."""
    run = run_of("gpt")
    group = bench.group_of_degree(run.world, 2)
    before = group.sent.calls.total()
    held = measure_memory(run, Trial(lengths=(40, 24), group=group))
    return held.num_bytes, held.layers[1], group.sent.calls.total() - before


def test_bytes_are_counted_without_a_word_to_other_ranks(ranks):
    found = ranks(2).run(bytes_of_a_trial_alone)
    assert [sent for *_, sent in found] == [0, 0]
    assert found[0][:2] == found[1][:2]


@pytest.mark.parametrize(
    ("longest", "degree", "slot_tokens"), [(8192, 1, 1), (8192, 48, 1), (17 * 64, 2, 64), (1, 1, 1)]
)
def test_ladders_double_up_to_the_longest_and_give_every_rank_slots(longest, degree, slot_tokens):
    packs = ladder(longest, degree=degree, slot_tokens=slot_tokens)
    assert packs[-1] == (longest,)
    assert all(lengths[0] // slot_tokens >= degree for lengths in packs)
    for (one,), (other,) in pairwise(packs):
        assert one // slot_tokens == other // slot_tokens // 2
    short = many_short(packs, slot_tokens=slot_tokens)
    assert len(short) >= 2 or longest == slot_tokens
    assert all(length % slot_tokens == 0 and length > 0 for length in short)
    assert sum(short) <= longest


@pytest.mark.parametrize(
    "trained",
    ["layers.3.down", *(pytest.param(n, marks=pytest.mark.deep) for n in ("head", "layers.2", "layers.0.out"))],
)
def test_models_that_train_only_some_layers_are_measured(ranks, trained):
    """Also where the two layers that stand for all would have no backward."""
    for rows in ranks(2).run(frozen_run, trained):
        assert {degree for degree, *_ in rows} == {1, 2}
        assert all(backward_s > 0 for _, backward_s, _ in rows)
        assert all(kept > 0 for *_, kept in rows)


def frozen_run(trained):  # type: ignore[no-untyped-def]
    model = Gpt()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained in name)
    table = measure(prepared(model), longest=64, degrees=[1, 2], effort=ProfilingEffort(repeats=1))
    return [(row.degree, row.backward_s, row.kept_bytes) for row in table.rows]


def test_a_profile_that_cannot_be_kept_is_used_all_the_same(tmp_path):
    (tmp_path / "file").write_text("")
    run, told, handler = run_of("gpt", num_layers=2), list[str](), logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("lengthwise").addHandler(handler)
    path = tmp_path / "file" / "folder" / "profile.json"
    table, was_found = find_table(
        run, path, lambda: measure(run, longest=32, degrees=[1], effort=ProfilingEffort(repeats=1)), longest=32,
        degrees=[1],
    )  # fmt: skip
    logging.getLogger("lengthwise").removeHandler(handler)
    assert table.rows and not was_found
    assert any("cannot be kept in" in words and "Not a directory" in words for words in told)
