"""Curves through measured layers find what made them, and whole-model costs obey DCP's equations over them."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lengthwise.core.cost import LinkSpeed
from lengthwise.core.errors import InputError
from lengthwise.core.layer_profile import Identity, LayerRow, LayerTable, LinkRow
from lengthwise.core.pipeline_config import Method, PipelineConfig, Strategy, dense_scheme, homogeneous, uniform_scheme
from lengthwise.core.specs import cluster_preset
from lengthwise.core.wording import GIB
from lengthwise.cost.corrected import CorrectedCost
from lengthwise.cost.profiled.degree_fit import QuadraticSeconds, fit_degree
from lengthwise.cost.profiled.dual_layer import MIXED_S, DualLayerCost
from lengthwise.cost.profiled.layer_gather_cost import LayerGatherCost, Moment
from tests.cost.profiled.equations import LayerProfile

CLUSTER = cluster_preset("4xcpu")
LAYERS, PARAMS = 6, 12_345
PACKS = ((64,), (256,), (1024,), (4096,), (63, 64) * 16)
FORWARD, BACKWARD, CONSTANT = (1e-9, 1e-6, 2e-4), (2.5e-9, 2e-6, 3e-4), (0.0, 4e-7, 1e-3)
IDENTITY = Identity(
    model_name="Gpt", model_digest="0123", device="cpu", dtype="float32", num_ranks=4, software="torch 2.13"
)


def seconds(lengths, coefficients, degree):
    a, b, c = coefficients
    return (a * sum(n * n for n in lengths) + b * sum(lengths)) / degree + c


def row(lengths, degree=1, noise=1.0):
    tokens = sum(lengths) // degree
    return LayerRow(
        lengths=lengths, degree=degree, forward_s=noise * seconds(lengths, FORWARD, degree),
        backward_s=seconds(lengths, BACKWARD, degree), constant_s=seconds(lengths, CONSTANT, degree),
        forward_spread_s=0.0, backward_spread_s=0.0, constant_spread_s=0.0, kept_bytes=800 * tokens + 32,
        input_bytes=64 * tokens, constant_bytes=500 * tokens + 7, alive_bytes=900 * tokens, repeats=3,
    )  # fmt: skip


def table(rows=None, **changes):
    rows = [row(lengths, degree) for degree in (1, 2) for lengths in PACKS] if rows is None else rows
    values = {"num_layers": LAYERS, "num_params": PARAMS, "other_bytes": 99, "longest": 4096, "update_s": 0.02}
    return LayerTable(identity=IDENTITY, rows=tuple(rows), **{**values, **changes})


TABLE = table()
COST = DualLayerCost(TABLE, cluster=CLUSTER)


def scheme_of(degree, recomputed=0):
    method = Method.DENSE if degree == 1 else Method.ULYSSES
    return uniform_scheme(LAYERS, degree=degree, method=method, recomputed=recomputed)


@pytest.mark.parametrize("degree", [1, 2])
def test_curves_find_the_coefficients_that_made_the_rows(degree):
    found = fit_degree(TABLE.of_degree(degree))
    for curve, (a, b, c) in ((found.forward, FORWARD), (found.backward, BACKWARD), (found.constant, CONSTANT)):
        assert (curve.a_s, curve.b_s, curve.c_s) == pytest.approx((a / degree, b / degree, c), rel=1e-6)
    assert max(map(abs, found.time_residuals)) < 1e-9
    lines = ((found.kept_layer, 32, 800), (found.inputs, 0, 64), (found.rest, 7, 500), (found.alive, 0, 900))
    for line, fixed, per_token in lines:
        assert (line.fixed, line.per_token) == pytest.approx((fixed, per_token / degree), rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("degree", [1, 2])
@pytest.mark.parametrize("recomputed", [0, 1, 4, 6])
@pytest.mark.parametrize("lengths", PACKS)
def test_whole_models_cost_what_equations_4_to_6_say(degree, recomputed, lengths):
    measured, scheme = row(lengths, degree), scheme_of(degree, recomputed)
    profile = LayerProfile(
        forward_s=measured.forward_s, backward_s=measured.backward_s, constant_s=measured.constant_s,
        kept_bytes=measured.kept_bytes, input_bytes=measured.input_bytes, constant_bytes=measured.constant_bytes,
    )  # fmt: skip
    assert COST.time_s(lengths, scheme) == pytest.approx(profile.time_s(LAYERS, recomputed))
    expected = profile.peak_bytes(LAYERS, recomputed)
    if recomputed:  # the layer that is there again is measured as it is, with what else its backward needs
        expected += measured.alive_bytes - measured.kept_bytes
    assert COST.predict(lengths, degree, recomputed) == pytest.approx((profile.time_s(LAYERS, recomputed), expected))
    state = COST.peak_bytes(0, scheme, num_devices=4)
    assert COST.peak_bytes(sum(lengths), scheme, num_devices=4) - state == pytest.approx(expected, abs=1.5)


def test_a_pack_of_many_short_sequences_pays_the_constant_once():
    scheme = scheme_of(1)
    alone = COST.sequence_times_s(np.array([50]), scheme)[0]
    assert COST.time_s([50] * 40, scheme) == pytest.approx(40 * alone + COST.overhead_s(scheme))
    assert COST.overhead_s(scheme) == pytest.approx(LAYERS * (FORWARD[2] + BACKWARD[2]) + CONSTANT[2])
    assert COST.overhead_s(scheme_of(1, 2)) == pytest.approx(COST.overhead_s(scheme) + 2 * FORWARD[2])


@given(
    st.lists(st.integers(1, 10**6), min_size=1, max_size=8), st.integers(1, 1000), st.sampled_from([1, 2]),
    st.integers(0, LAYERS),
)  # fmt: skip
def test_times_and_bytes_grow_with_every_length(lengths, more, degree, recomputed):
    scheme, longer = scheme_of(degree, recomputed), [lengths[0] + more, *lengths[1:]]
    assert 0 < COST.time_s(lengths, scheme) < COST.time_s(longer, scheme)
    few, many = COST.peak_bytes([sum(lengths), sum(longer)], scheme, num_devices=4)
    assert few < many
    assert COST.time_s(lengths, scheme_of(degree, 0)) <= COST.time_s(lengths, scheme)


@given(st.lists(st.floats(0.5, 2.0), min_size=len(PACKS), max_size=len(PACKS)))
def test_noise_never_makes_a_coefficient_negative_or_a_sequence_free(noise):
    rows = [row(lengths, noise=factor) for lengths, factor in zip(PACKS, noise)]
    cost = DualLayerCost(table(rows), cluster=CLUSTER)
    curve: QuadraticSeconds = cost.fits[1, Method.DENSE].forward
    assert min(curve.a_s, curve.b_s, curve.c_s) >= 0
    times = cost.sequence_times_s(np.array([1, 10, 100]), scheme_of(1))
    assert 0 < times[0] < times[1] < times[2]


@given(st.lists(st.floats(0.8, 1.25), min_size=len(PACKS), max_size=len(PACKS)))
def test_no_measured_pack_needs_more_bytes_than_predicted(noise):
    rows = [
        replace(each, kept_bytes=int(each.kept_bytes * factor), alive_bytes=int(each.alive_bytes / factor))
        for each, factor in zip(map(row, PACKS), noise)
    ]
    cost = DualLayerCost(table(rows), cluster=CLUSTER)
    for each in rows:
        needed = LAYERS * (each.kept_bytes + each.input_bytes) + each.constant_bytes
        assert cost.predict(each.lengths, 1, 0)[1] >= needed * (1 - 1e-12)
        needed = LAYERS * each.input_bytes + each.constant_bytes + each.alive_bytes
        assert cost.predict(each.lengths, 1, LAYERS)[1] >= needed * (1 - 1e-12)


def test_model_state_is_whole_weights_and_gradients_and_a_share_of_the_optimizer():
    state = COST.peak_bytes(0, scheme_of(2), num_devices=4)
    assert state == 8 * PARAMS + 16 * -(-PARAMS // 4) + 99
    half = DualLayerCost(replace(TABLE, identity=replace(IDENTITY, dtype="bfloat16")), cluster=CLUSTER)
    assert half.peak_bytes(0, scheme_of(2), num_devices=4) == 6 * PARAMS + 16 * -(-PARAMS // 4) + 99


def test_max_tokens_is_the_most_that_fits_a_device():
    small = replace(CLUSTER, device=replace(CLUSTER.device, memory_bytes=GIB // 64))
    cost = DualLayerCost(TABLE, cluster=small)
    for recomputed in (0, LAYERS):
        most = cost.max_tokens(scheme_of(1, recomputed), num_devices=4)
        within, beyond = cost.peak_bytes([most, most + 1], scheme_of(1, recomputed), num_devices=4)
        assert within <= GIB // 64 < beyond
    assert cost.max_tokens(scheme_of(1, LAYERS), num_devices=4) > cost.max_tokens(scheme_of(1), num_devices=4)


def test_updates_take_what_was_measured_and_nothing_moves_between_strategies():
    before, after = homogeneous(scheme_of(1), 4), homogeneous(scheme_of(2), 4)
    assert COST.update_s(before) == COST.update_s(after) == 0.02
    assert COST.switch_s(before, after) == 0.0


def test_layers_that_share_by_other_methods_cost_what_was_measured_of_each():
    slower = [replace(row(lengths, 2, noise=3.0), method="ring", kept_bytes=900 * sum(lengths)) for lengths in PACKS]
    cost = DualLayerCost(table([*TABLE.rows, *slower]), cluster=CLUSTER)
    assert cost.table.shared == ((1, "dense"), (2, "ring"), (2, "ulysses"))
    ulysses, ring = (
        uniform_scheme(LAYERS, degree=2, method=method, recomputed=2) for method in (Method.ULYSSES, Method.RING)
    )
    assert cost.time_s((256,), ulysses) == pytest.approx(COST.time_s((256,), ulysses))
    more_s = 2 * (LAYERS + 2) * seconds((256,), FORWARD, 2)
    assert cost.time_s((256,), ring) == pytest.approx(cost.time_s((256,), ulysses) + more_s, rel=1e-3)
    mixed = replace(ring, methods=(Method.RING,) * 3 + (Method.ULYSSES,) * 3)
    short = DualLayerCost(table([*TABLE.rows, *slower[:2]]), cluster=CLUSTER)
    assert [short.largest_pack(scheme) for scheme in (scheme_of(1), ulysses, ring, mixed)] == [4096, 4096, 256, 256]
    assert CorrectedCost(short, time_factors={2: 2.0}).largest_pack(ring) == 256
    assert cost.time_s((256,), mixed) == pytest.approx((cost.time_s((256,), ring) + cost.time_s((256,), ulysses)) / 2)
    bytes_of = [cost.micro_batch_bytes(256, scheme) for scheme in (ulysses, mixed, ring)]
    assert bytes_of[0] < bytes_of[1] < bytes_of[2]


def staged(*stage_layers, recomputed=()):
    flags = tuple(layer in recomputed for layer in range(LAYERS))
    return PipelineConfig(degree=1, stage_layers=stage_layers, methods=(Method.DENSE,) * LAYERS, recompute=flags)


SPEED = LinkRow(degree=4, latency_s=1e-3, bytes_per_s=1e6)


@pytest.mark.parametrize("links", [(), (SPEED,)])
def test_a_pipeline_takes_the_seconds_of_its_slowest_stage_and_of_its_messages(links):
    cost, measured = DualLayerCost(table(links=links), cluster=CLUSTER), row((256,))
    both_s, head_s = measured.forward_s + measured.backward_s, measured.constant_s
    device = CLUSTER.device
    per_s, call_s = (0.8 * device.link_bytes_per_s, device.link_call_s) if not links else (1e6, 1e-3)
    sent_s = 2 * 64 * 256 / per_s + 2 * call_s
    for scheme, stage_s in (
        (staged(2, 2, 2), 2 * both_s + head_s),
        (staged(3, 2, 1), max(3 * both_s, both_s + head_s)),
        (staged(3, 2, 1, recomputed=(0, 5)), 3 * both_s + measured.forward_s),
    ):
        assert cost.time_s((256,), scheme) == pytest.approx(stage_s + sent_s, rel=1e-6)
    assert cost.head_layers == pytest.approx(
        np.median([row(n).constant_s / (row(n).forward_s + row(n).backward_s) for n in PACKS])
    )


def test_each_stage_keeps_the_micro_batches_that_1f1b_has_begun_on_it():
    """A layer keeps 800 bytes a token, is given or sends 64; 500 are beside the layers, 900 are one in full."""
    tokens = 1000
    whole = COST.micro_batch_bytes(tokens, scheme_of(1)) / tokens
    assert whole == pytest.approx(6 * 864 + 500, rel=1e-3)
    first = 3 * (2 * 864 + 64) + 900
    assert COST.micro_batch_bytes(tokens, staged(2, 2, 2)) / tokens == pytest.approx(first, rel=1e-3)
    last = 5 * 864 + 2 * 64 + 500
    assert COST.micro_batch_bytes(tokens, staged(1, 5)) / tokens == pytest.approx(last, rel=1e-3)
    recomputed = 2 * (3 * 64 + 64) + 900
    assert COST.micro_batch_bytes(tokens, staged(3, 3, recomputed=range(6))) / tokens == pytest.approx(
        max(recomputed, 5 * 64 + 900 + 500), rel=1e-3
    )
    state = COST.peak_bytes(0, staged(2, 2, 2), num_devices=4)
    assert state == COST.peak_bytes(0, scheme_of(1), num_devices=4), "every stage holds all weights"


def test_where_an_allocator_was_asked_the_largest_of_three_moments_is_the_peak():
    """Beside what layers keep 500 bytes a token in the loss, in its backward 700 or 100, in that of a layer 300."""
    tokens, saved = 1000, 6 * 864
    for loss_backward, recomputed, expected in ((700, 0, saved + 700), (100, 0, saved + 500), (100, 6, 6 * 64 + 1200)):
        rows = [
            replace(
                row(lengths),
                loss_backward_bytes=loss_backward * sum(lengths),
                backward_bytes=300 * sum(lengths),
                embedding_backward_bytes=90 * sum(lengths),
            )
            for lengths in PACKS
        ]
        cost = DualLayerCost(table(rows), cluster=CLUSTER)
        found = cost.micro_batch_bytes(tokens, scheme_of(1, recomputed)) / tokens
        assert found == pytest.approx(expected, rel=1e-3)
        first = cost._lines_of(staged(3, 3))[0]
        assert first[Moment.BACKWARD].per_token == pytest.approx(2 * (3 * 864 + 64) + 300)
        assert first[Moment.EMBEDDING_BACKWARD].per_token == pytest.approx(3 * 864 + 64 + 90), (
            "one has had its backward"
        )


def test_a_stage_whose_weights_are_gathered_for_a_step_is_priced_with_its_own_alone():
    """8 bytes of each weight and its gradient, those of frozen ones, and a quarter of 16 and of these on each rank."""
    gather = LayerGatherCost(unit_params=(50, *(100,) * 6, 70), unit_frozen_bytes=(8, *(4,) * 6, 0), dtype="float32")
    cost, shares = DualLayerCost(table(other_bytes=32), cluster=CLUSTER, gather=gather), 16 * 720 // 4 + 32 // 4
    bytes_of = {scheme: int(cost.peak_bytes(0, scheme, num_devices=4)) for scheme in (staged(4, 2), staged(2, 4))}
    assert list(bytes_of.values()) == [shares + 8 * 450 + 24, shares + 8 * (50 + 400 + 70) + 24]
    early = DualLayerCost(table(other_bytes=32), cluster=CLUSTER, gather=replace(gather, has_early_output=True))
    assert early.peak_bytes(0, staged(4, 2), num_devices=4) == shares + 8 * 520 + 24
    assert cost.overhead_s(staged(6)) - COST.overhead_s(staged(6)) == pytest.approx(gather.micro_batch_s(CLUSTER))
    assert cost.overhead_s(staged(3, 3)) == COST.overhead_s(staged(3, 3)), "nothing is gathered for a micro-batch"


def test_steps_in_which_ranks_would_hold_more_than_a_stage_cost_more_than_any_other():
    gather = LayerGatherCost(unit_params=(9,) * 8, unit_frozen_bytes=(0,) * 8, dtype="float32")
    cost = DualLayerCost(TABLE, cluster=CLUSTER, gather=gather)
    stages = Strategy(schemes=(staged(3, 3),) * 2, ranks=((0, 1), (2, 3)))
    mixed = Strategy(schemes=(staged(3, 3), staged(6), staged(6)), ranks=((0, 1), (2,), (3,)))
    turned = Strategy(schemes=(staged(3, 3),) * 2, ranks=((1, 0), (2, 3)))
    assert cost.update_s(stages) == COST.update_s(mixed) == 0.02 < MIXED_S == cost.update_s(mixed)
    assert cost.switch_s(stages, stages) == COST.switch_s(stages, turned) == 0.0 < cost.switch_s(stages, turned)


def test_what_was_not_measured_is_refused():
    for scheme in (scheme_of(4), dense_scheme(5), uniform_scheme(LAYERS, degree=2, method=Method.RING)):
        with pytest.raises(InputError, match="no layer profile for scheme"):
            COST.overhead_s(scheme)
    with pytest.raises(InputError, match="taken in int8"):
        DualLayerCost(replace(TABLE, identity=replace(IDENTITY, dtype="int8")), cluster=CLUSTER)


def test_tables_survive_a_file_and_other_files_are_refused_by_name(tmp_path):
    path = tmp_path / "deep" / "profile.json"
    TABLE.save(path)
    assert LayerTable.load(path) == TABLE
    assert LayerTable.load(path).identity.digest == IDENTITY.digest != replace(IDENTITY, num_ranks=2).digest
    assert IDENTITY.differences(replace(IDENTITY, num_ranks=2)) == ["num ranks 2 instead of 4"]
    text = path.read_text()
    for damaged in (text[:-20], "[]", text.replace('"layers"', '"lengths"'), text.replace('"degree"', '"degrees"')):
        path.write_text(damaged)
        with pytest.raises(InputError, match=r"profile\.json is no profile of layers"):
            LayerTable.load(path)
    path.write_text(text.replace('"schema_version": 1', '"schema_version": 2'))
    with pytest.raises(InputError, match="has schema 2, this version reads 1"):
        LayerTable.load(path)
    with pytest.raises(InputError, match="no profile at"):
        LayerTable.load(tmp_path / "other.json")


def test_impossible_measurements_are_refused():
    with pytest.raises(InputError, match="takes time and keeps something"):
        table([replace(row((64,)), forward_s=0.0)])
    with pytest.raises(InputError, match="no rows"):
        table([])


@pytest.mark.parametrize("recomputed", [0, LAYERS])
def test_offloaded_layers_are_on_the_host_but_for_two_and_copies_cost_what_passes_do_not_hide(recomputed):
    device = replace(CLUSTER.device, host_bytes_per_s=1e6, host_memory_bytes=GIB)
    cost = DualLayerCost(TABLE, cluster=replace(CLUSTER, device=device))
    kept = scheme_of(2, recomputed)
    offloaded = replace(kept, offload=(True,) * LAYERS)
    saved = (32 if recomputed else 32 + 400) * 4096 + (0 if recomputed else 32)
    freed = cost.micro_batch_bytes(4096, kept) - cost.micro_batch_bytes(4096, offloaded)
    assert freed == pytest.approx((LAYERS - 2) * saved, rel=1e-6)
    assert cost.host_bytes(4096, offloaded, num_devices=4) == pytest.approx(LAYERS * saved, rel=1e-5)
    forward_s, backward_s = (seconds([4096], pass_s, 2) - pass_s[2] for pass_s in (FORWARD, BACKWARD))
    copy_s = saved / (0.8 * 1e6)
    exposed_s = LAYERS * (2 * copy_s - forward_s - backward_s - bool(recomputed) * forward_s)
    assert cost.time_s([4096], offloaded) - cost.time_s([4096], kept) == pytest.approx(exposed_s, rel=1e-3)
    fast = DualLayerCost(TABLE, cluster=replace(CLUSTER, device=replace(device, host_bytes_per_s=1e12)))
    assert fast.time_s([4096], offloaded) == pytest.approx(fast.time_s([4096], kept), rel=1e-4)
    with pytest.raises(InputError, match="nothing of a cpu"):
        COST.time_s([4096], offloaded)


def test_the_loss_has_one_offloaded_layer_on_the_device_and_a_backward_two():
    """In a profile that knows the moments apart, as those of GPUs do."""
    apart = [replace(row, loss_backward_bytes=1, backward_bytes=1, embedding_backward_bytes=1) for row in TABLE.rows]
    device = replace(CLUSTER.device, host_bytes_per_s=1e6, host_memory_bytes=GIB)
    cost = DualLayerCost(table(apart), cluster=replace(CLUSTER, device=device))
    offloaded = replace(scheme_of(2, 0), offload=(True,) * LAYERS)
    (moments,) = cost._lines_of(offloaded)
    layer = (32 + 400) * 4096 + 32
    for moment, rest, num_layers in ((Moment.LOSS, 250 * 4096 + 7, 1), (Moment.BACKWARD, 1, 2)):
        assert moments[moment].at(4096) == pytest.approx(rest + num_layers * layer, rel=1e-6)


def test_copies_are_priced_by_the_link_to_the_host_that_was_measured():
    cluster = cluster_preset("4xH100-80GB")
    kept = scheme_of(2, 0)
    offloaded = replace(kept, offload=(True,) * LAYERS)
    exposed_s = []
    for bytes_per_s in (None, 4e7, 2e7):
        host = None if bytes_per_s is None else LinkSpeed(call_s=1e-5, bytes_per_s=bytes_per_s)
        cost = DualLayerCost(table(host=host), cluster=cluster)
        exposed_s.append(cost.time_s([4096], offloaded) - cost.time_s([4096], kept))
        saved = LayerTable.of_document(json.loads(json.dumps(cost.table.document)))
        assert saved.host == host
    copied = LAYERS * (864 * 2048 + 32)
    passes_s = LAYERS * (row((4096,), 2).forward_s + row((4096,), 2).backward_s - 5e-4)
    assert exposed_s[0] == pytest.approx(0.0, abs=1e-4)
    for bytes_per_s, seconds_s in zip((4e7, 2e7), exposed_s[1:]):
        assert seconds_s == pytest.approx(2 * copied / bytes_per_s - passes_s, rel=1e-2)


def test_tiles_cost_what_was_measured_in_them():
    tiled = []
    for lengths in PACKS:
        measured = row(lengths)
        kept_bytes = 300 * sum(lengths)
        tiled.append(replace(measured, tile_tokens=16, kept_bytes=kept_bytes, backward_s=2 * measured.backward_s))
    cost = DualLayerCost(table(rows=[*(row(lengths) for lengths in PACKS), *tiled]), cluster=CLUSTER)
    plain = scheme_of(1)
    in_tiles = replace(plain, tile_tokens=16)
    assert cost.tile_tokens == 16
    added_s = cost.time_s([1024], in_tiles) - cost.time_s([1024], plain)
    assert added_s == pytest.approx(LAYERS * row((1024,)).backward_s, rel=1e-6)
    freed = cost.micro_batch_bytes(1024, plain) - cost.micro_batch_bytes(1024, in_tiles)
    assert freed == pytest.approx(LAYERS * (500 * 1024 + 32), rel=1e-3)
    assert COST.time_s([1024], plain) == cost.time_s([1024], plain)
    for scheme in (replace(plain, tile_tokens=8), replace(plain, head_groups=2)):
        with pytest.raises(InputError, match="there are tiles of 16 tokens, no groups of heads"):
            cost.time_s([1024], scheme)
    with pytest.raises(InputError, match="no tiles of feed-forwards"):
        COST.time_s([1024], in_tiles)


def test_groups_of_heads_cost_what_was_measured_in_them_and_those_alone_are_offered():
    rows, grouped = [row(lengths, degree) for degree in (1, 2) for lengths in PACKS], []
    for measured in rows[len(PACKS) :]:
        kept_bytes = measured.kept_bytes - 200 * measured.num_tokens
        grouped.append(replace(measured, head_groups=4, kept_bytes=kept_bytes, backward_s=2 * measured.backward_s))
    cost = DualLayerCost(table(rows=[*rows, *grouped]), cluster=CLUSTER)
    plain = scheme_of(2)
    in_groups = replace(plain, head_groups=4)
    assert [CorrectedCost(cost).head_groups(degree) for degree in (1, 2)] == [(), (4,)]
    added_s = cost.time_s([1024], in_groups) - cost.time_s([1024], plain)
    assert added_s == pytest.approx(LAYERS * row((1024,), 2).backward_s, rel=1e-6)
    freed = cost.micro_batch_bytes(1024, plain) - cost.micro_batch_bytes(1024, in_groups)
    assert freed == pytest.approx(LAYERS * 200 * 1024, rel=1e-3)
    for changes in ({"head_groups": 2}, {"head_groups": 4, "tile_tokens": 16}):
        with pytest.raises(InputError, match="there are no tiles of feed-forwards, 4 groups of heads"):
            cost.time_s([1024], replace(plain, **changes))
