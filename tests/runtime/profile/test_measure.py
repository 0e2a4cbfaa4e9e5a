"""What is measured: every pack once per repeat, on all ranks together, with bytes that grow with tokens."""

import json
from dataclasses import replace

import pytest
import torch

from lengthwise.core.batch import GlobalBatch
from lengthwise.core.cost import LayerParts, ProfileRow, ProfileTable
from lengthwise.core.pipeline_config import Method
from lengthwise.core.profile_packs import ladder
from lengthwise.core.specs import cluster_preset, model_preset
from lengthwise.cost.profiled.fitted import FittedCost, fit
from lengthwise.cost.profiled.measured_schemes import tables_by_scheme
from lengthwise.plan.planner import Planner
from lengthwise.plan.space.search_space import SearchSpace, make_problem
from lengthwise.runtime.comm.world import DistContext
from lengthwise.runtime.models.registry import build_model
from lengthwise.runtime.profile.measure import _kept_bytes, _loss_of, _random_feed, num_measurements, profile
from tests.cost.profiles import kept_bytes_per_token
from tests.runtime.train.runs import local_world
from tests.sim.random_plans import SPEC


@pytest.mark.parametrize(("longest", "most"), [(32, 32), (100, 100), (4096, 4096), (1000, 5000), (5000, 1024)])
def test_ladders_reach_the_longest_length_and_separate_the_coefficients(longest, most):
    packs = ladder(longest, most)
    assert len(set(packs)) == len(packs)
    assert max(max(pack) for pack in packs) == longest
    if longest > 32:
        assert len(packs) >= 3
        assert any(len(pack) > 1 for pack in packs) or most < 64
        assert all(len(pack) == 1 or sum(pack) <= most for pack in packs)


def test_a_profile_has_a_row_per_pack_and_fits(ranks):
    for table, calls in ranks(2).run(_profile, recompute=False):
        assert [row.lengths for row in table.rows] == ladder(128, 128)
        assert calls == num_measurements(ladder(128, 128), 2)
        assert table.num_ranks == 2
        assert min(row.time_s for row in table.rows) > 0
        assert fit(table).bytes_per_token > 0
        sizes = {sum(row.lengths): row.kept_bytes for row in table.rows}
        assert sizes[128] > sizes[64] > sizes[32] > 0


SHARED = [(2, Method.RING), (2, Method.MEGATRON_TS)]
MEASURED = [*SHARED, (2, Method.METP)]
"""Those, and one that plans have only where it is asked for."""


@pytest.fixture(scope="module")
def measured(ranks):
    """Of two ranks: the profile of what they compute alone and share by several methods, and how often they did."""
    return ranks(2).run(_profile, recompute=False, shared=MEASURED)


def test_what_ranks_share_is_measured_under_every_method_and_the_links_between_them(measured):
    for table, calls in measured:
        assert [(part.degree, part.method) for part in table.shared] == MEASURED
        assert all([row.lengths for row in part.rows] == ladder(128, 128) for part in table.shared)
        assert calls == num_measurements(ladder(128, 128), 2, num_shared=len(MEASURED))
        alone, *shares = (max(row.kept_bytes for row in rows) for rows in (table.rows, *(p.rows for p in table.shared)))
        assert shares[0] < 0.8 * alone, "each rank keeps its share of the tokens"
        assert [part.update_s is None for part in table.shared] == [True, False, False], (
            "sharded weights move otherwise"
        )
        assert table.links.within is None and table.links.across.bytes_per_s > 1e6
        cost = FittedCost(
            tables_by_scheme(table, num_layers=SPEC.num_layers), model=SPEC, cluster=cluster_preset("2xcpu")
        )
        problem = make_problem(
            cost,
            cluster=cluster_preset("2xcpu"),
            num_layers=SPEC.num_layers,
            max_length=128,
            search_space=SearchSpace(),
        )
        assert {(k.scheme.degree, k.scheme.methods[0]) for k in problem.candidates} == {(1, Method.DENSE), *SHARED}
        batch = GlobalBatch(step=0, ids=(0, 1, 2), lengths=(128, 40, 7))
        Planner(policy="auto", problem=problem)(batch).check_covers(batch)


def test_both_parts_of_a_layer_are_measured_under_every_method(measured):
    for table, _ in measured:
        for rows in (table.rows, *(part.rows for part in table.shared)):
            for row in rows:
                parts = row.parts
                assert min(parts.attention_s, parts.ffn_s) > 0 < min(parts.attention_bytes, parts.ffn_bytes)
                layers = SPEC.num_layers * (parts.attention_bytes + parts.ffn_bytes)
                assert layers < 1.1 * row.kept_bytes
        dense, longest = table.rows, {part.method: part.rows for part in table.shared}
        largest = max(range(len(dense)), key=lambda row: sum(dense[row].lengths))
        assert longest["ring"][largest].parts.ffn_bytes < 0.6 * dense[largest].parts.ffn_bytes
        assert longest["metp"][largest].parts.ffn_bytes < longest["ring"][largest].parts.ffn_bytes


def test_a_profile_without_the_parts_of_layers_is_read(tmp_path):
    row = ProfileRow(lengths=(9,), time_s=1.0, spread_s=0.0, kept_bytes=1)
    table = ProfileTable(
        model_digest="", model_name="", device="cpu", dtype="float32", recompute=False, num_ranks=1, update_s=0.0,
        rows=(row, replace(row, parts=LayerParts(attention_s=0.5, ffn_s=0.25, attention_bytes=3, ffn_bytes=4))),
    )  # fmt: skip
    table.save(tmp_path / "new.json")
    assert ProfileTable.load(tmp_path / "new.json") == table
    document = json.loads((tmp_path / "new.json").read_text())
    for row in document["rows"]:
        del row["parts"]
    (tmp_path / "old.json").write_text(json.dumps(document))
    assert [row.parts for row in ProfileTable.load(tmp_path / "old.json").rows] == [None, None]


@pytest.mark.deep
def test_recomputing_keeps_fewer_bytes(ranks):
    whole, again = (ranks(2).run(_profile, recompute=flag)[0][0] for flag in (False, True))
    assert again.recompute
    assert fit(again).bytes_per_token < 0.8 * fit(whole).bytes_per_token


@pytest.mark.parametrize("recompute", [False, True])
def test_kept_bytes_are_the_ones_the_memory_model_counts(recompute):
    spec = replace(model_preset("llama-tiny"), num_heads=2, num_kv_heads=1, head_size=64)
    model = build_model(spec, dtype=torch.float32, seed=0)
    flags = (recompute,) * spec.num_layers
    world = DistContext(rank=0, size=1, device=torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    few, many = (
        _kept_bytes(
            model,
            _loss_of(model, _random_feed((length,), spec, world, generator), flags, world),
            world,
            recompute=recompute,
        )
        for length in (256, 1024)
    )
    expected = kept_bytes_per_token(spec, dtype="float32", recompute=recompute)
    assert (many - few) / 768 == pytest.approx(expected, rel=0.05)  # the rotary tables are left out


def _profile(recompute, shared=()):
    calls = []
    table = profile(
        build_model(SPEC, dtype=torch.float32, seed=0),
        SPEC,
        local_world(ranks_per_node=1),
        packs=ladder(128, 128),
        recompute=recompute,
        repeats=2,
        shared=shared,
        on_row=lambda: calls.append(None),
    )
    return table, len(calls)
