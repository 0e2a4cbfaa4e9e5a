"""The worked examples of CONTRIBUTING.md: a policy, a reader, and a parallel method that is exact in float64."""

import sys
from unittest.mock import patch

import numpy as np
import pytest

from lengthwise.index.build import build_index
from lengthwise.index.settings import IndexSettings
from lengthwise.index.store import open_index
from lengthwise.plan.planner import Planner
from tests.docs.blocks import write_modules
from tests.plan.costs import make_batch, make_problem


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    write_modules(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    return tmp_path


def test_the_policy_plans_each_sequence_once():
    lengths = tuple(np.random.default_rng(0).integers(1, 100, 20).tolist())
    plan = Planner(policy="my_policies:one_by_one", problem=make_problem(num_devices=3))(make_batch(lengths))
    assert [len(pipeline.micro_batches) for pipeline in plan.pipelines] == [7, 7, 6]


def test_the_reader_makes_an_index_of_functions(here):
    (here / "SRC").mkdir()
    (here / "SRC" / "code.py").write_text("import os\n\ndef one():\n    return 1\n\ndef two():\n    return 2\n")
    build_index(IndexSettings(source=here / "SRC", reader="my_readers:functions"), here / "DIR", workers=1)
    store = open_index(here / "DIR")
    assert [bytes(store.tokens(id)[:-1].tolist()).decode() for id in range(len(store))] == [
        "def one():\n    return 1", "def two():\n    return 2",
    ]  # fmt: skip


@pytest.mark.parametrize("num_ranks", [pytest.param(1, marks=pytest.mark.deep), 3])
def test_the_parallel_method_equals_one_device(here, num_ranks):
    from tests.runtime.harness import RankPool

    pool = RankPool(num_ranks)
    try:
        pool.run(check_method, str(here))
    finally:
        pool.close()


def check_method(folder):
    """On every rank: loss and every gradient under the example are those of one device."""
    sys.path.insert(0, folder)
    import my_method

    from lengthwise.core.pipeline_config import Method
    from lengthwise.runtime.parallel import sharded_execution
    from tests.runtime.models.cases import assert_same
    from tests.runtime.parallel.cases import on_one_device, on_ranks, small

    calls = []
    attend_to_all = my_method.attend_to_all
    my_method.attend_to_all = lambda *args, **options: calls.append(1) or attend_to_all(*args, **options)
    for spec in (small(), small(causal=False, family="bert", gated_ffn=False, max_positions=40)):
        with patch.object(sharded_execution, "make_operators", lambda method: my_method.operators):
            loss, gradients = on_ranks(spec, (7, 1, 12, 5, 2, 5), (Method.ULYSSES,) * 2)
        expected_loss, expected = on_one_device(spec, (7, 1, 12, 5, 2, 5))
        assert_same(loss, expected_loss, tolerance=1e-10)
        assert_same(gradients, expected, tolerance=1e-10)
    assert len(calls) == 4
