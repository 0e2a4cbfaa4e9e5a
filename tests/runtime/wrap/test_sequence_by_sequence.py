"""Models that packs would change train exactly, sequence by sequence."""

import random
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lengthwise as lw
from lengthwise.core.errors import InputError
from lengthwise.runtime.wrap.sequence_by_sequence import SequenceBySequence, seed_for_sequence
from tests.runtime.loop.modules import VOCAB
from tests.runtime.loop.odd_modules import Odd
from tests.runtime.loop.runs import EXACT, Case, Packs, assert_exact, shard_of, step_on_ranks
from tests.runtime.loop.test_families import _new
from tests.runtime.loop.test_plain_modules import LOGITS, built
from tests.session import models
from tests.session.structure_runs import OPTIONS, rows

PACKS = {
    1: (Packs(ranks=(0,), packs=((2, 3, 6), (0, 8), (4, 1, 5, 7, 9)), recompute=(True, False, True)),),
    2: (
        Packs(ranks=(0,), packs=((2, 3, 6), (0, 8)), recompute=(True, False, True)),
        Packs(ranks=(1,), packs=((4, 1), (5, 7, 9)), recompute=(False, True)),
    ),
}
ODDITIES = (
    "token shift", "short convolution", "second mixer", "log-n scaling", "sinks and window", "strides",
    "sinks and wide window", "shared keys",
)  # fmt: skip


QUICK = ("short convolution", "sinks and window", "shared keys")


@pytest.mark.first_cells(1)
@pytest.mark.parametrize(
    "oddity", [pytest.param(name, marks=[pytest.mark.deep] * (name not in QUICK)) for name in ODDITIES]
)
def test_what_packs_would_change_is_exact_sequence_by_sequence(ranks, oddity):
    case = Case(build=partial(built, Odd, oddity), **LOGITS, options={"by_sequence": True})
    for num_ranks, packs in PACKS.items():
        for result in ranks(num_ranks).run(step_on_ranks, case, packs):
            assert_exact(case, result, oddity)


SPECIAL = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0)


def t5():
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 24, "num_layers": 3, "num_heads": 4, "dropout_rate": 0.0}
    return _new(T5ForConditionalGeneration, T5Config(vocab_size=VOCAB, **sizes, decoder_start_token_id=0, **SPECIAL))


def mamba():
    from transformers import MambaConfig, MambaForCausalLM

    sizes = {"hidden_size": 16, "state_size": 4, "num_hidden_layers": 3}
    return _new(MambaForCausalLM, MambaConfig(vocab_size=VOCAB, **sizes, **SPECIAL))


def lfm2():
    from transformers import Lfm2Config, Lfm2ForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4}
    return _new(
        Lfm2ForCausalLM, Lfm2Config(vocab_size=VOCAB, **sizes, num_key_value_heads=2, full_attn_idxs=[1], **SPECIAL)
    )


def stock_loss(model, tokens, targets):
    """The stock call; an encoder with a decoder is given the next tokens as labels, which it does not shift."""
    tokens = torch.as_tensor(tokens)[None]
    if tokens.shape[1] < 2:
        return sum(parameter.sum() for parameter in model.parameters()) * 0.0
    shifted = torch.cat([tokens[:, 1:], tokens.new_full((1, 1), -100)], dim=1)
    labels = shifted if model.config.is_encoder_decoder else tokens
    return model(input_ids=tokens, labels=labels, use_cache=False).loss * (tokens.shape[1] - 1)


@pytest.mark.first_cells(1)
@pytest.mark.parametrize("build", [t5, mamba, pytest.param(lfm2, marks=pytest.mark.deep)])
def test_encoders_with_decoders_recurrences_and_hybrids_train_as_the_stock_call_does(ranks, build):
    case = Case(build=build, sum_of_losses=stock_loss, options={"by_sequence": True})
    for result in ranks(2).run(step_on_ranks, case, PACKS[2]):
        assert_exact(case, result, build.__name__)


class Noisy(Odd):
    """Draws in ways that ranks could not share, and leaves out layers."""

    def __init__(self):
        super().__init__("layer drop")

    def forward(self, tokens, positions=None):
        x = F.dropout(super().forward(tokens, positions), 0.3, self.training)
        return x * torch.empty(1, 1, 1, dtype=x.dtype).bernoulli_(0.7) + torch.randn(1, 1, VOCAB) * 0.1


def test_random_numbers_are_those_of_a_sequence_whatever_the_plan(ranks):
    case = Case(build=partial(built, Noisy), **LOGITS, options={"by_sequence": True})
    (losses, changes), *_ = ranks(1).run(step_on_ranks, case, PACKS[1])
    others = ranks(2).run(step_on_ranks, case, PACKS[2])
    again, _ = ranks(1).run(step_on_ranks, case, PACKS[1], seed=1)[0]
    assert abs(losses[0] - again[0]) > 1e-3, "it draws"
    for other_losses, other_changes in others:
        assert abs(losses[0] - other_losses[0]) < EXACT
        assert all((changes[name] - change).abs().max() < EXACT for name, change in other_changes.items())


class Outputs(nn.Module):
    def forward(self, x, scale=2.0):
        return {"states": x * scale, "loss": x.mean(), "first": x[0, :1, 0], "name": "it", "length": x.shape[1]}


def test_outputs_are_put_together_as_a_pack_has_them_or_refuse_to_be_used():
    forward = SequenceBySequence(Outputs().forward, "Outputs")
    x = torch.arange(24.0).view(1, 8, 3)
    shard = shard_of((5, 2, 1), ids=(4, -1, 7))
    shard.targets_of = lambda: (4, 0)
    output = forward(shard, (x,), {"scale": 1.0})
    expected = torch.cat([x[:, :5], torch.zeros(1, 2, 3), x[:, 7:]], dim=1)
    assert torch.equal(output["states"], expected), "padding is not computed"
    assert torch.equal(output["loss"], x[:, :5].mean()), "weighted by targets"
    assert output["name"] == "it"
    for use in (lambda: output["length"] + 1, lambda: output["first"].sum(), lambda: torch.stack([output["first"]])):
        with pytest.raises(InputError, match="has one value for each of several sequences"):
            use()


def test_outputs_of_sequences_without_targets_do_not_count_even_if_they_are_no_numbers():
    forward = SequenceBySequence(lambda x: {"loss": x.mean() / (x.shape[1] != 2)}, "Outputs")
    x, shard = torch.arange(1.0, 9.0).view(1, 8), shard_of((5, 2, 1), ids=(4, 7, 2))
    shard.targets_of = lambda: (3, 0, 1)
    assert float(forward(shard, (x,), {})["loss"]) == (3 * 3.0 + 8.0) / 4
    shard.targets_of = lambda: (0, 0, 0)
    assert float(forward(shard, (x,), {})["loss"]) == 3.0, "there is a loss, which nobody weighs"


def test_padding_after_the_sequences_is_zeros_and_forms_do_not_differ():
    forward = SequenceBySequence(lambda x: {"states": x * 2.0}, "Outputs")
    x, shard = torch.ones(1, 9, 3), shard_of((1, 5, 3), ids=(4, 7))
    shard.targets_of = lambda: (1, 4)
    assert torch.equal(forward(shard, (x,), {})["states"], torch.cat([x[:, :6] * 2.0, x[:, 6:] * 0.0], dim=1))
    assert shard.preserves_rng, "layers that recompute draw the same again"
    odd = SequenceBySequence(lambda x: {"states" if x.shape[1] > 1 else "state": x}, "Outputs")
    with pytest.raises(InputError, match="returns outputs of different forms for sequences of different lengths"):
        odd(shard, (x,), {})


def test_axes_are_those_that_grew_whatever_sizes_there_are():
    forward = SequenceBySequence(lambda x: x * torch.arange(1.0, x.shape[1] + 1), "Outputs")
    for length in (5, 7):
        shard = shard_of((length,))
        shard.targets_of = lambda: (1,)
        forward(shard, (torch.ones(8, length),), {})
    forward.learn((5, 7))
    shard = shard_of((5, 3))
    shard.targets_of = lambda: (1, 1)
    expected = torch.tensor([1.0, 2, 3, 4, 5, 1, 2, 3]).expand(8, 8)
    assert torch.equal(forward(shard, (torch.ones(8, 8),), {}), expected)


def test_every_generator_draws_for_a_sequence_in_its_step_and_goes_on_as_before():
    def numbers():
        return random.random(), float(np.random.rand()), float(torch.rand([]))

    def drawn(sequence, **options):
        with seed_for_sequence(shard_of((4,), **options), sequence):
            return numbers()

    def start():
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(5)

    first = drawn(3)
    start()
    expected = numbers()
    start()
    assert drawn(3) == first
    assert numbers() == expected
    for other in (drawn(4), drawn(3, step=1), drawn(3, seed=1)):
        assert all(one != two for one, two in zip(first, other))


class Writes(models.GPT):
    """Writes into all that it is given, or into copies of it."""

    copies = False

    def forward(self, idx, position_ids, kind, targets=None):
        if self.copies:
            idx, position_ids, kind, targets = idx.clone(), position_ids.clone(), kind.clone(), targets.clone()
        idx[:, 0] = 5
        position_ids[:, :1] = 3
        kind.masked_fill_(kind == 2, 0)
        targets[:, :1].clamp_(max=9)
        x = self.tokens(idx) + self.places(position_ids) + self.places(kind)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def train_writing(copies, **options):
    """Weights after a step, and the tokens that the loop has after its forwards."""
    torch.manual_seed(0)
    model, tokens = Writes().double(), []
    model.copies = copies
    items = [{"input_ids": row.tolist(), "kind": (row % 3).tolist()} for row in rows()]
    with lw.prepare(model, items, steps=1, **OPTIONS, **options) as run:
        for step in run.steps():
            for micro_batch in step:
                inputs = micro_batch.inputs
                step.backward(model(**inputs))
                tokens.append(inputs["idx"].clone())
            step.update()
    return {name: value.detach().clone() for name, value in model.named_parameters()}, torch.cat(tokens, 1)


def test_a_forward_may_write_into_its_arguments(caplog):
    weights, tokens = train_writing(False)
    assert "Writes is computed sequence by sequence" in caplog.text
    expected, untouched = train_writing(True, packing="never")
    for name, value in expected.items():
        torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-12)
    changed = tokens != untouched
    assert 0 < changed.sum() <= len(rows()) and (tokens[changed] == 5).all()
