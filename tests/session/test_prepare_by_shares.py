"""`prepare(weights="by-layer")` traces, checks and measures a model of which no rank ever has all weights."""

import gc

import numpy as np
import pytest
import torch

import lengthwise as lw
from lengthwise.core.errors import CheckError, InputError
from lengthwise.session.weight_placement import whole_bytes
from tests.runtime.harness import with_check
from tests.session import models
from tests.session.loops import as_started_by_torchrun, step_through, weights_of
from tests.session.test_prepare import EXACT, OPTIONS, Averaging, assert_equal_weights, loop_on_one_device

NUM_RANKS, NUM_LAYERS = 3, 4
BY_LAYER = OPTIONS | {"weights": "by-layer", "memory_gib": 40}


def live_bytes():
    """Bytes of all tensors that this process can reach, but for blocks of host memory, which are not of the device."""
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    return num_bytes([tensor for tensor in tensors if tensor.dtype is not torch.uint8])


def num_bytes(tensors):
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


class Peaks:
    """The most bytes of a model's weights, and of all tensors, at any layer of any forward or backward."""

    def __init__(self, model):
        gc.collect()
        self._model, self._before, self._count = model, live_bytes() - num_bytes(model.parameters()), 0
        self.weights = self.all = 0
        for layer in model.blocks:
            layer.register_forward_pre_hook(self._sample)
            layer.register_full_backward_hook(self._sample)

    def _sample(self, *_):
        self.weights = max(self.weights, num_bytes(self._model.parameters()))
        self._count += 1
        if self._count % 61 == 0:  # which meets every layer
            self.all = max(self.all, live_bytes() - self._before)


def peaks_of_prepare(**options):
    """Layers' worth of weights, of weights outside of layers and of all tensors, relative to a layer's."""
    as_started_by_torchrun()
    torch.manual_seed(0)
    model = models.GPT(width=64, num_layers=NUM_LAYERS).double()
    whole, layer = num_bytes(model.parameters()), num_bytes(model.blocks[0].parameters())
    peaks = Peaks(model)
    options = BY_LAYER | {"steps": 1, "recompute": "all"} | options
    run = lw.prepare(model, models.rows(4, longest=12), **options)
    assert run.is_cuttable or not options.get("check", True), "stages were compared as well"
    run.close()
    assert num_bytes(model.parameters()) == whole, "close() gives all weights back"
    return peaks.weights / layer, (whole - NUM_LAYERS * layer) / layer, peaks.all / layer


def assert_shares(peaks, *, most):
    for weights, others, state in peaks:
        assert 1 < weights <= 2 + others + 0.01, "two layers, and what is before and after all of them"
        gathered = 2 * (2 + others) + 1  # two layers with gradients, and the gradients of one that are sent
        assert state <= most * (NUM_LAYERS + others) / NUM_RANKS + gathered + 1, (
            "shares, gathered layers, activations of a few tokens"
        )


@pytest.mark.deep
def test_a_model_is_traced_and_compared_two_layers_at_a_time(ranks):
    """Shares of the weights, of gradients twice (the optimizer's, the check's), and of both sides of the comparison."""
    assert_shares(
        ranks(NUM_RANKS).run(with_check, peaks_of_prepare, cost=models.mixed_cost(), recompute="all", max_degree=1),
        most=5,
    )


@pytest.mark.deep
def test_a_model_is_measured_with_two_layers_on_each_rank(ranks, tmp_path):
    """No more than the shares of training: weights, gradients and two moments."""
    options = {"profile": tmp_path / "profile.json", "verbose": False, "max_degree": 1}
    assert_shares(ranks(NUM_RANKS).run(peaks_of_prepare, **options), most=4)


def prepare_what_packs_would_change():
    as_started_by_torchrun()
    torch.manual_seed(0)
    model = Averaging()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(CheckError, match="which calls cumsum") as refused:
        lw.prepare(model, models.rows(), cost=models.mixed_cost(), **BY_LAYER)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items()), "it is given back"
    return str(refused.value)


def test_a_refused_model_is_given_back_whole(ranks):
    refusals = ranks(2).run(with_check, prepare_what_packs_would_change)
    assert len(set(refusals)) == 1


def train_where_weights_do_not_fit():
    as_started_by_torchrun()
    model = models.adapted_gpt()
    needed = whole_bytes(model, 3)
    options = BY_LAYER | {"weights": "auto", "cost": models.mixed_cost(), "recompute": "none"}
    runs = []
    for memory_bytes in (needed * 1.01, needed * 0.99):
        model = models.adapted_gpt()
        run = lw.prepare(model, models.rows(), **options | {"memory_gib": memory_bytes / 2**30, "memory_margin": 0.0})
        runs.append((run.gather is not None, step_through(run)[0]))
        run.close()
    return *runs, weights_of(model)


@pytest.mark.deep
def test_auto_makes_shares_at_once_where_all_weights_do_not_fit_a_device(ranks):
    losses, weights = loop_on_one_device(make=models.adapted_gpt)
    for (is_whole_gathered, whole), (is_gathered, by_layer), found in ranks(3).run(
        with_check, train_where_weights_do_not_fit
    ):
        assert (is_whole_gathered, is_gathered) == (False, True)
        np.testing.assert_allclose(by_layer, losses, rtol=EXACT)
        np.testing.assert_allclose(whole, losses, rtol=EXACT)
        assert_equal_weights(found, weights)


class Borrowing(models.GPT):
    """Its first layer computes with a weight of its last one."""

    def __init__(self):
        super().__init__()
        self.double()
        own = self.blocks[0].mlp.forward
        self.blocks[0].mlp.forward = lambda x: own(x) + self.blocks[2].mlp[0].bias.sum()


def prepare_borrowing():
    as_started_by_torchrun()
    with pytest.raises(InputError, match=r"blocks.2.mlp.0.bias cannot be read.*weights='whole'"):
        lw.prepare(Borrowing(), models.rows(), cost=models.mixed_cost(), **BY_LAYER)


def test_a_layer_that_computes_with_weights_of_another_is_refused(ranks):
    ranks(2).run(prepare_borrowing)
