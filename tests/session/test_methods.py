"""A prepared run shares sequences by the methods that it may use, and is exact under each."""

import pytest

import lengthwise as lw
from lengthwise.config.prepare_options import read_options
from lengthwise.core.errors import InputError
from tests.session import models
from tests.session.loops import as_started_by_torchrun, weights_of
from tests.session.test_prepare import OPTIONS, assert_equal_weights, loop_on_one_device

STEPS = 2


def train_by(methods, **options):
    """Weights after two steps, and the methods of all groups of ranks that computed."""
    as_started_by_torchrun()
    model, used = models.gpt(), set()
    run = lw.prepare(
        model, models.rows(), memory_gib=40, methods=methods, verbose=False, recompute="none",
        **{"cost": models.mixed_cost(), **OPTIONS, "steps": STEPS, **options},
    )  # fmt: skip
    for step in run.steps():
        for micro_batch in step:
            step.backward(model(**micro_batch.inputs)[1])
        step.update()
        used |= {
            (pipeline.scheme.degree > 1, str(method))
            for pipeline in step.plan.pipelines for planned in pipeline.micro_batches
            for method in pipeline.methods_of(planned)
        }  # fmt: skip
    run.close()
    return weights_of(model), used


@pytest.mark.parametrize(
    ("num_ranks", "methods"),
    [
        pytest.param(3, ("ring",), marks=pytest.mark.deep),  # by default: as they are measured, below
        pytest.param(4, ("ulysses_ring",), marks=pytest.mark.deep),
        *(pytest.param(n, (name,), marks=pytest.mark.deep) for n in (2, 3, 4) for name in ("ulysses", "all_gather")),
    ],
)
def test_a_run_uses_the_methods_that_it_may_and_trains_what_one_device_trains(ranks, num_ranks, methods):
    _, expected = loop_on_one_device(STEPS)
    for weights, used in ranks(num_ranks).run(train_by, methods):
        assert_equal_weights(weights, expected)
        assert {method for is_shared, method in used if is_shared} == set(methods)
        assert {method for is_shared, method in used if not is_shared} <= {"dense"}


def test_methods_are_measured_and_priced_each_by_itself(ranks, tmp_path):
    for weights, used in ranks(2).run(train_measured, tmp_path / "profile.json"):
        assert_equal_weights(weights, loop_on_one_device(1)[1])
        assert used <= {(True, "ulysses"), (True, "ring"), (False, "dense")}
    from lengthwise.core.layer_profile import LayerTable

    assert LayerTable.load(tmp_path / "profile.json").shared == ((1, "dense"), (2, "ring"), (2, "ulysses"))


def train_measured(path):
    return train_by(None, cost=None, profile=path, steps=1)


@pytest.mark.parametrize("methods", [("megatron_ts",), ("dense",), (), "dense"])
def test_methods_that_share_no_attention_are_refused_before_anything_is_read(methods):
    with pytest.raises(InputError, match="methods: "):
        read_options({"methods": methods})
    assert [str(method) for method in read_options({}).sharing_methods] == ["ulysses", "ring"]
    assert [str(method) for method in read_options({"methods": ["ring", "ring"]}).sharing_methods] == ["ring"]
