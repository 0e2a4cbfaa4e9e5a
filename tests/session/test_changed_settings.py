"""What a loop sets after `prepare` is compared with the stock model before a step is computed with it."""

import logging
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

import lengthwise as lw
from lengthwise.core.errors import CheckError
from lengthwise.runtime.loop.changed_settings import ChangedSettings
from tests.runtime.harness import with_check
from tests.session import models
from tests.session.loops import as_started_by_torchrun, weights_of
from tests.session.test_prepare import OPTIONS


class Ramped(models.GPT):
    """Adds a mean over its tokens, which mixes a pack's sequences, and an embedding, which does not."""

    def __init__(self):
        super().__init__()
        self.mixed, self.places_weight, self.calls = 0.0, 1.0, 0
        self.drop = nn.Dropout(0.1)
        self.register_buffer("scale", torch.zeros(()))

    def forward(self, idx, targets=None):
        self.calls += 1
        x = self.tokens(idx) + self.places_weight * self.places(torch.arange(idx.shape[1]))
        for block in self.blocks:
            x = self.drop(block(x))
        if self.mixed:
            x = x + self.mixed * x.mean(1, keepdim=True)
        logits = self.head(self.norm(x + self.scale * x.mean(1, keepdim=True)))
        loss = None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)
        return logits, loss


def ramp(change, caplog=None, **options):
    """How often packs were compared again in three steps, before the later two of which ``change`` is called."""
    as_started_by_torchrun()
    torch.manual_seed(0)
    model = Ramped().double()
    run = lw.prepare(model, models.rows(), cost=models.mixed_cost(), memory_gib=40, **OPTIONS | options)
    try:
        for step in run.steps():
            for micro_batch in step:
                step.backward(model(**micro_batch.inputs)[1])
            step.update()
            change(model, step.number)
    finally:
        run.close()


def raise_mixed(model, step):
    model.mixed = 0.1 * (step + 1)


def write_scale(model, step):
    model.scale.fill_(0.1)


def raise_harmless(model, step):
    model.places_weight = 1 - 0.1 * (step + 1)
    model.drop.p = 0.1 * (step + 2)


def on_second_rank(model, step):
    if torch.distributed.get_rank() == 1:
        model.places_weight = 0.5


def message_of(change, **options):
    with pytest.raises(CheckError) as raised:
        ramp(change, **options)
    return str(raised.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (raise_mixed, "mixed became 0.1"),
        pytest.param(write_scale, "scale has changed", marks=pytest.mark.deep),  # as a number of a tensor below
    ],
)
@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.deep)])
def test_a_setting_that_begins_to_mix_sequences_is_refused_before_its_step(ranks, change, said, num_ranks):
    """On several ranks one changes it alone, below."""
    for message in [message_of(change)] if num_ranks == 1 else ranks(2).run(with_check, message_of, change):
        assert message.startswith("step 1: since prepare, ") and said in message
        assert "and now Ramped learns something else from" in message
    ramp(change, check=False)


@pytest.mark.deep
def test_settings_that_a_loop_changes_at_every_step_are_compared_ever_more_seldom(caplog):
    with caplog.at_level(logging.INFO, logger="lengthwise"):
        ramp(raise_harmless, steps=7)
    ending = ": packs are compared with the stock model again"
    lines = [text for record in caplog.records if (text := record.getMessage()).endswith(ending)]
    assert lines[0] == f"step 1: places_weight became 0.9, drop.p became 0.2{ending}"
    assert [line.partition(":")[0] for line in lines] == ["step 1", "step 2", "step 3", "step 4"]


class Held:
    weight = 0.0


CHANGES = {
    "a number of NumPy": (0.0, lambda model: setattr(model, "held", np.float64(0.3))),
    "a truth value of NumPy": (False, lambda model: setattr(model, "held", np.bool_(True))),
    "a tensor": (0.0, lambda model: setattr(model, "held", torch.tensor(0.3))),
    "a tensor's number": (torch.zeros(()), lambda model: model.held.fill_(0.3)),
    "an array": (np.zeros(1), lambda model: model.held.fill(0.3)),
    "a dictionary": ({"weight": 0.0}, lambda model: model.held.update(weight=0.3)),
    "a list": ([0.0], lambda model: model.held.__setitem__(0, 0.3)),
    "a set": (set(), lambda model: model.held.add("mixes")),
    "an object": (Held(), lambda model: setattr(model.held, "weight", 0.3)),
    "a frozen weight": (nn.Parameter(torch.zeros(()), requires_grad=False), lambda model: model.held.data.fill_(0.3)),
    "a dtype": (None, lambda model: setattr(model, "held", torch.float32)),
    "what is gone": (3, lambda model: delattr(model, "held")),
    "a method": (0.0, lambda model: setattr(model, "helper", lambda: 0.3)),
    "a class": (0.0, lambda model: setattr(type(model), "scale", 0.3)),
    "a method of a class": (0.0, lambda model: setattr(type(model), "helper", lambda self: 0.3)),
    "a module": (nn.ModuleList(), lambda model: model.held.append(nn.Identity())),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_whatever_a_model_holds_is_a_setting(name):
    class Model(nn.Linear):
        scale = 0.0

        def helper(self):
            return self.scale

    value, change = CHANGES[name]
    model = Model(2, 2)
    model.held = value
    settings = ChangedSettings(model)
    assert not settings.changes()
    change(model)
    found = settings.changes()
    assert found and settings.changes() == found, "until packs are compared"
    settings.note(found)
    assert not settings.changes()


def test_large_contents_of_a_model_are_not_looked_through():
    model = nn.Linear(2, 2)
    model.held, model.words = [[0.0] * 4000 for _ in range(4000)], dict.fromkeys(range(1 << 20))
    assert len(ChangedSettings(model)._before) < 100


def test_a_setting_of_one_rank_alone_is_refused_where_ranks_share_sequences(ranks):
    for message in ranks(2).run(with_check, message_of, on_second_rank, policy="dcp-intra"):
        assert "step 1: since prepare, " in message


class HardTokens:
    """A mean over the tokens whose loss is above a limit, which the loop raises."""

    limit = 0.0

    def __call__(self, output, micro_batch):
        losses = F.cross_entropy(output[0][0], micro_batch.targets, reduction="none")
        return losses[losses > self.limit].mean()


def compare_later(is_first_alone=False):
    as_started_by_torchrun()
    loss, model = HardTokens(), models.gpt()
    options = OPTIONS | {"loss": loss, "inputs": lambda micro_batch: {"idx": micro_batch.tokens[None]}}
    run = lw.prepare(model, models.rows(), cost=models.mixed_cost(), memory_gib=40, **options)
    step = next(run.steps())
    for micro_batch in step:
        step.backward(loss(model(**micro_batch.inputs), micro_batch))
    before = step.update().loss, weights_of(model), torch.get_rng_state()
    if is_first_alone and run.world.rank > 0:
        run.save("nowhere")
    run.compare()
    assert torch.equal(torch.get_rng_state(), before[2])
    for name, value in weights_of(model).items():
        assert (value == before[1][name]).all(), "nothing is left of a comparison"
    loss.limit = 4.0
    run.compare()


def later_message(**options):
    with pytest.raises(CheckError) as raised:
        compare_later(**options)
    return str(raised.value)


@pytest.mark.deep  # by default: on one rank below, a setting on two above
def test_packs_are_compared_again_where_a_loop_asks_for_it(ranks):
    for message in ranks(2).run(with_check, later_message):
        assert "GPT learns something else from" in message


@pytest.mark.deep
def test_a_comparison_that_one_rank_alone_asks_for_is_told_on_all(ranks):
    for message in ranks(2).run(with_check, partial(later_message, is_first_alone=True)):
        assert "rank 0 called run.compare() before step 1" in message and "rank 1 called run.save()" in message


def test_comparisons_call_no_hooks_of_the_loop_and_change_no_weights():
    """Such as one that counts the tokens of experts, whose bias the loop then writes."""

    def train(compares):
        torch.manual_seed(0)
        model, seen = Ramped().double(), []
        run = lw.prepare(model, models.rows(), cost=models.mixed_cost(), memory_gib=80, **OPTIONS)
        run.compares_changes = compares
        model.blocks[0].register_forward_hook(lambda module, args, output: seen.append(output.shape[1]))
        for step in run.steps():
            for micro_batch in step:
                step.backward(model(**micro_batch.inputs)[1])
            step.update()
            model.places_weight = 1 - 0.001 * sum(seen)
        return seen, weights_of(model)

    (seen, weights), (expected, expected_weights) = train(True), train(False)
    assert seen == expected
    assert all((weights[name] == value).all() for name, value in expected_weights.items())


class Switches(nn.Module):
    """Puts another module in the place of one at its first forward, as BigBird's attention does, to the same effect."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Identity())

    def forward(self, x):
        if isinstance(self.inner[0], nn.Identity):
            self.inner[0] = nn.Dropout(0.0)
        return self.inner(x)


class Switching(models.GPT):
    def __init__(self):
        super().__init__()
        self.norm = nn.Sequential(self.norm, Switches())


def test_what_forwards_change_themselves_is_no_setting(caplog):
    model = Switching().double()
    with caplog.at_level(logging.INFO, logger="lengthwise"):
        run = lw.prepare(model, models.rows(), cost=models.mixed_cost(), memory_gib=80, **OPTIONS)
        for step in run.steps():
            for micro_batch in step:
                step.backward(model(**micro_batch.inputs)[1])
            step.update()
    assert not any("compared with the stock model again" in record.getMessage() for record in caplog.records)


def test_a_setting_changed_before_a_checkpoint_is_loaded_is_compared(tmp_path):
    for change in (None, raise_mixed):
        torch.manual_seed(0)
        model = Ramped().double()
        run = lw.prepare(model, models.rows(), cost=models.mixed_cost(), memory_gib=80, **OPTIONS)
        if change is None:
            run.save(tmp_path)
            run.close()
            continue
        change(model, 0)
        run.resume(tmp_path)
        with pytest.raises(CheckError, match=r"since prepare, mixed became 0\.1"):
            next(run.steps())


def test_packs_are_compared_between_steps_of_an_open_run():
    torch.manual_seed(0)
    model = Ramped().double()
    run = lw.prepare(model, models.rows(), cost=models.mixed_cost(), memory_gib=80, **OPTIONS)
    run.compare()
    with run.plain(), pytest.raises(CheckError, match=r"run.compare\(\) within run.plain\(\)"):
        run.compare()
    for step in run.steps():
        with pytest.raises(CheckError, match=r"in the midst of step 0; call it after step\.update"):
            run.compare()
        for micro_batch in step:
            step.backward(model(**micro_batch.inputs)[1])
        step.update()
        break
    run.compare()
    run.close()
    for call in (run.compare, lambda: run.save("nowhere"), lambda: next(run.steps())):
        with pytest.raises(CheckError, match=r"after run.close\(\), which gave the model back"):
            call()


def test_checkpointing_that_a_loop_switches_on_is_left_out_again(caplog):
    config = LlamaConfig(
        vocab_size=models.VOCAB, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2
    )
    model = LlamaForCausalLM(config)
    run = lw.prepare(model, models.rows(), cost=models.mixed_cost(), memory_gib=80, **OPTIONS)
    model.gradient_checkpointing_enable()
    for step in run.steps():
        for micro_batch in step:
            step.backward(model(**micro_batch.inputs).loss)
        step.update()
    assert [record.message for record in caplog.records if "left out again" in record.message] == [
        "the model's activation checkpointing is left out again: plans choose it; see recompute="
    ]
    assert not any("compared with the stock model" in record.message for record in caplog.records)
    run.close()
