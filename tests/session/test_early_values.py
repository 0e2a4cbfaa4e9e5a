"""Models whose loops may read what early layers made are trained in one stage, and others keep their stages."""

import warnings
from collections.abc import Mapping

import pytest
import torch

import lengthwise as lw
from lengthwise.core.batch import Pack
from lengthwise.core.errors import CheckError, InputError
from lengthwise.runtime.loop.synthetic_batches import whole_shard
from lengthwise.runtime.verify import stage_values
from lengthwise.runtime.verify.stage_check import check_stages
from lengthwise.runtime.wrap.context import active
from lengthwise.runtime.wrap.late_hooks import LateHooks
from lengthwise.runtime.wrap.stage_pass import StagedForward
from tests.runtime.harness import with_check
from tests.runtime.loop.profile_runs import llama
from tests.session import early_values
from tests.session.structure_runs import LENGTHS, OPTIONS, build, outcomes, rows

ONE_EACH = (1, 1, 1)


@pytest.mark.first_cells(1)
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("Returned", r"returns what its earlier layers made \(output\[2\]\['states'\]\[0\]\)"),
        pytest.param(
            "ReturnedDetached", r"returns what its earlier layers made \(output\[2\]\)", marks=pytest.mark.deep
        ),
        ("Summed", r"returns what its earlier layers made \(output\[2\]\)"),
        ("Kept", r"blocks\.0\.term of Kept keeps what a layer made"),
        ("KeptInBag", r"blocks\.0\.bag\.terms\[\d+\] of KeptInBag keeps what a layer made"),
        ("KeptBeside", r"tests\.session\.early_values\['KEPT'\]\[\d\] of KeptBeside keeps what a layer made"),
        ("KeptByHook", r"blocks\.0\.mlp\._forward_hooks\['seen'\]\[0\] of KeptByHook keeps what a layer made"),
        ("KeptByScript", r"blocks\.0\.mlp\._forward_hooks\['terms'\]\[\d+\] of KeptByScript keeps what a layer made"),
        ("KeptByPatch", r"blocks\.0\.forward\['terms'\]\[\d+\] of KeptByPatch keeps what a layer made"),
        ("KeptInClosure", r"methods of .*Layer\['terms'\]\[\d+\] of KeptInClosure keeps what a layer made"),
        ("LastKept", ""),
    ],
)
def test_stages_are_refused_where_a_loss_may_read_what_early_layers_made(name, reason):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of weight norm
        model = build(f"early_values.{name}")
    run = lw.prepare(model, rows(), steps=1, check=False, **OPTIONS)
    if not reason:
        check_stages(run, ONE_EACH)
    else:
        with pytest.raises(CheckError, match=reason + r".*plan with one stage"):
            check_stages(run, ONE_EACH)
        with pytest.raises(CheckError, match=reason):
            check_stages(run, ONE_EACH, slices=True)
    run.close()


@pytest.mark.deep
def test_a_plan_in_stages_of_ones_own_is_refused_and_others_train(ranks):
    for found in ranks(2).run(with_check, outcomes, "early_values.Kept", kinds=("ring", "stages")):
        assert found["ring"] < 1e-10
        assert str(found["stages"]).startswith("CheckError: blocks.0.term of Kept keeps what a layer made")


def last_stage(model, change=lambda model: None, **arguments):
    """After a ``change`` of the prepared model, what it returns on a stage of one layer that gets zeros."""
    run = lw.prepare(model, rows(), steps=1, check=False, **OPTIONS)
    change(model)
    pack = Pack(ids=(0,), lengths=LENGTHS[:1])
    shard = whole_shard(run, pack)
    shard.stage_pass = StagedForward(layers=range(2, 3), num_layers=3, receive=torch.zeros_like)
    with active(shard):
        micro_batch = run.make(shard, pack)
        try:
            return model(**micro_batch.inputs, **arguments)
        finally:
            run.close()


@pytest.mark.parametrize("is_frozen", [False, True], ids=["trained", "frozen"])
def test_a_loss_of_a_layer_on_another_stage_has_no_backward(is_frozen):
    """A forward may return other values than when stages were compared."""
    model = build("early_values.Returned")
    for embedding in (model.tokens, model.places):
        embedding.requires_grad_(not is_frozen)
    _, loss, states = last_stage(model)
    loss.backward()
    first, received, _ = states["states"]
    assert first.isfinite().all() and loss.isfinite() and not received.any(), "code between layers may read them"
    with pytest.raises(InputError, match=r"reads what layer 0 returned, .*; plan with one stage \(max_stages=1\)"):
        first.square().sum().backward()


def test_hidden_states_that_a_call_asks_for_are_refused_in_stages():
    with pytest.raises(InputError, match=r"output_hidden_states=True asks LlamaForCausalLM .*\(max_stages=1\)"):
        last_stage(llama(), output_hidden_states=True)


def test_hooks_that_transformers_registers_for_good_when_it_is_asked_for_hidden_states_are_no_late_ones():
    model = llama()
    late = LateHooks(model.model.layers)
    model(torch.tensor([[1, 2, 3]]), output_hidden_states=True)
    assert any(module._forward_hooks for module in model.modules())
    late.check()


class Corpus(Mapping):
    """Documents that are read when they are asked for."""

    def __len__(self):
        return 10**6

    def __iter__(self):
        return iter(range(10**6))

    def __getitem__(self, key):
        raise AssertionError("it was read")


class Documents(list):
    """A list that counts how often it is read."""

    num_read = 0

    def __iter__(self):
        for member in super().__iter__():
            self.num_read += 1
            yield member


def test_a_corpus_beside_a_model_is_not_read(monkeypatch):
    tokens = [Documents(range(2000)) for _ in range(100)]
    members = Documents([{number: [number]} for number in range(3 * stage_values.MOST)])
    lists = [Documents([[k]] * stage_values.MOST) for k in range(2 * stage_values.MOST_OF_ALL // stage_values.MOST)]
    for name, value in {"CORPUS": Corpus(), "TOKENS": tokens, "MEMBERS": members, "LISTS": lists}.items():
        monkeypatch.setattr(early_values, name, value, raising=False)
    with stage_values.values_of_forward(build("early_values.Kept"), stage_values.ForwardValues()):
        pass
    assert sum(of_document.num_read for of_document in tokens) <= 2 * len(tokens), "lists of numbers hold no tensor"
    assert members.num_read <= 2 * (stage_values.MOST + 1)
    assert sum(of_list.num_read for of_list in lists) <= 2 * (stage_values.MOST_OF_ALL + len(lists))


def halve(module, inputs, gradients):
    return tuple(None if gradient is None else gradient / 2 for gradient in inputs)


HOOKS = {
    "full backward": lambda layer: layer.register_full_backward_hook(halve),
    "forward": lambda layer: layer.mlp.register_forward_hook(lambda module, inputs, output: None),
}


@pytest.mark.parametrize("kind", HOOKS)
def test_hooks_in_layers_that_come_after_prepare_are_refused_in_stages(kind):
    """A stage's forward ends within its last layer, and what a hook collects is there on one stage alone."""
    with pytest.raises(InputError, match=r"layer 1 \(Block\) has a hook that was registered after prepare"):
        last_stage(build("structures.Plain"), lambda model: HOOKS[kind](model.blocks[1]))


def test_hooks_in_layers_that_were_there_before_are_compared():
    def compared(change):
        model = build("structures.Plain")
        change(model.blocks[1])
        run = lw.prepare(model, rows(), steps=1, check=False, **OPTIONS)
        try:
            check_stages(run, ONE_EACH)
        finally:
            run.close()

    compared(lambda layer: layer.register_full_backward_pre_hook(lambda module, gradients: (gradients[0] / 2,)))
    compared(lambda layer: layer.register_forward_hook(lambda module, inputs, output: output / 2))
    with pytest.raises(CheckError, match="learns something else in stages"):
        compared(HOOKS["full backward"])
