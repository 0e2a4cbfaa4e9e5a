"""Policies compared under measured costs: schemes and seconds are those of the profile."""

from dataclasses import replace

import numpy as np
import pytest

import lengthwise
from lengthwise.core.cost import LinkSpeed, LinkSpeeds, ProfileRow, ProfileTable, SharedRows
from lengthwise.core.errors import InputError
from lengthwise.core.specs import model_preset

GIVEN = {"model": "llama-tiny", "cluster": "2xcpu", "dtype": "float32", "steps": 1, "tokens_per_step": 20_000}
POLICIES = ["static", "auto"]


@pytest.fixture
def table():
    """Micro-batches of one rank, and the same 1.8 times as fast where two share them."""
    spec = model_preset("llama-tiny")
    alone, shared = (
        tuple(
            ProfileRow(lengths=(n,), time_s=(n + n * n / 1000) * 1e-4 / speed, spread_s=0.0, kept_bytes=n)
            for n in (512, 1024, 2048, 4096)
        )
        for speed in (1, 1.8)
    )
    return ProfileTable(
        model_digest=spec.digest, model_name=spec.name, device="cpu", dtype="float32", recompute=False, num_ranks=2,
        update_s=0.25, rows=alone, shared=(SharedRows(degree=2, method="ulysses", rows=shared),),
        links=LinkSpeeds(within=LinkSpeed(call_s=1e-4, bytes_per_s=1e9), across=None),
    )  # fmt: skip


@pytest.fixture
def lengths():
    return np.random.default_rng(0).integers(64, 4096, 200)


def test_policies_are_compared_by_the_seconds_that_were_measured(table, lengths, tmp_path):
    table.save(tmp_path / "profile.json")
    document = lengthwise.compare(lengths, policies=POLICIES, profile=tmp_path / "profile.json", **GIVEN).to_json()
    plain = lengthwise.compare(lengths, policies=POLICIES, **GIVEN).to_json()
    assert document["profile"] == str(tmp_path / "profile.json") and plain["profile"] is None
    assert 0 <= document["speed_error"] < 0.01, "the rows are exactly quadratic"
    (plan,) = lengthwise.plan(lengths, policy="static", profile=tmp_path / "profile.json", **GIVEN)
    packs = [(p.scheme.degree, m) for p in plan.pipelines for m in p.micro_batches]
    for degree, micro_batch in packs:
        lengths_of_pack = np.array(micro_batch.pack.lengths)
        seconds = (lengths_of_pack + lengths_of_pack**2 / 1000).sum() * 1e-4 / (1.8 if degree == 2 else 1)
        assert micro_batch.time_s == pytest.approx(seconds, rel=0.02)
    static = document["policies"][0]
    assert static["step_time_s"] == pytest.approx(plan.time_s) and plan.time_s > table.update_s
    assert static["step_time_s"] != pytest.approx(plain["policies"][0]["step_time_s"], rel=0.1)


@pytest.mark.parametrize(
    ("given", "changes", "message"),
    [
        ({"dtype": "bfloat16"}, {}, r"measured in float32, and plans are asked for in bfloat16; .* dtype=float32"),
        (
            {"cluster": "1x2xH100-80GB"},
            {},
            "measured on 'cpu', and plans are asked for H100-80GB; .* leave profile out",
        ),
        ({"recompute": "all"}, {}, "measured with recompute=none, and plans are asked for with recompute=all"),
        ({"network_gbit_per_s": 100}, {}, "network_gbit_per_s is for costs from a data sheet"),
        ({}, {"model_digest": "0" * 16}, r"profile\.json: the profile is of model .* or leave profile out"),
    ],
)
def test_a_profile_of_something_else_is_refused(table, lengths, tmp_path, given, changes, message):
    replace(table, **changes).save(tmp_path / "profile.json")
    with pytest.raises(InputError, match=message):
        lengthwise.compare(lengths, policies=["static"], profile=tmp_path / "profile.json", **{**GIVEN, **given})
