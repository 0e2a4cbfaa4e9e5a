"""Losses that models of transformers make themselves are those of the stock call, sequence by sequence."""

import numpy as np
import pytest
import torch

from lengthwise.runtime.wrap.label_convention import LabelConvention
from tests.runtime.loop.runs import EXACT, Case, Packs, assert_exact, in_double, prepared, step_on_ranks
from tests.runtime.loop.test_families import HEADS, SIZES, _new, llama
from tests.runtime.train.runs import local_world

PACKS = {
    1: (Packs(ranks=(0,), packs=((2, 3, 6), (0, 8), (4, 1, 5, 7, 9)), recompute=(True, False, True)),),
    3: (Packs(ranks=(0, 1, 2), packs=((2, 3, 6), (0, 8), (4, 1, 5, 7, 9)), recompute=(True, False, True)),),
}
SPECIAL = {"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2}
ROUTERS = {"num_experts_per_tok": 2, "output_router_logits": True, "router_aux_loss_coef": 0.1}


def mixtral():
    from transformers import MixtralConfig, MixtralForCausalLM

    return _new(MixtralForCausalLM, MixtralConfig(**SIZES, **HEADS, **ROUTERS, num_local_experts=4, **EAGER))


def qwen3_moe():
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = {"num_experts": 4, "moe_intermediate_size": 8, "head_dim": 8}
    return _new(Qwen3MoeForCausalLM, Qwen3MoeConfig(**SIZES, **HEADS, **ROUTERS, **sizes, **EAGER))


EAGER = {"experts_implementation": "eager"}


def bart():
    from transformers import BartConfig, BartForCausalLM

    sizes = {"d_model": 32, "decoder_layers": 3, "encoder_layers": 3, "decoder_attention_heads": 4}
    more = {"decoder_ffn_dim": 24, "max_position_embeddings": 40, "dropout": 0.0, "is_decoder": True}
    config = BartConfig(vocab_size=37, **sizes, **more, **SPECIAL, is_encoder_decoder=False, forced_eos_token_id=2)
    return _new(BartForCausalLM, config)


def stock_loss(model, tokens, targets):
    """The stock call; of a class that does not shift labels, with labels that its user has shifted."""
    tokens = torch.as_tensor(tokens)[None]
    if tokens.shape[1] < 2:
        return 0.0 * model(input_ids=tokens).logits.sum()
    is_decoder = getattr(model.config, "is_decoder", False)
    labels = torch.cat([tokens[:, 1:], tokens.new_full((1, 1), -100)], dim=1) if is_decoder else tokens
    return model(input_ids=tokens, labels=labels).loss * (tokens.shape[1] - 1)


@pytest.mark.parametrize("num_ranks", [pytest.param(1, marks=pytest.mark.deep), 3])
@pytest.mark.parametrize(
    "build", [qwen3_moe, *(pytest.param(build, marks=pytest.mark.deep) for build in (mixtral, bart))]
)
def test_the_loss_of_a_pack_is_that_of_the_stock_calls_weighted_by_targets(ranks, build, num_ranks):
    case = Case(build=build, sum_of_losses=stock_loss)
    for result in ranks(num_ranks).run(step_on_ranks, case, PACKS[num_ranks]):
        assert_exact(case, result, build.__name__)


def test_labels_are_shifted_as_the_stock_class_does(ranks):
    ranks(1).run(conventions)


def conventions():
    for build, expected in ((llama, LabelConvention()), (bart, LabelConvention(shifts=False, takes_shifted=False))):
        run = prepared(Case(build=build, sum_of_losses=stock_loss), (), local_world())
        assert run.wrapped_model.labels == expected, build.__name__
        run.close()


class Labelled:
    """Sequences whose labels are not their tokens, some of them ignored."""

    lengths = (9, 4, 6)

    def tokens(self, sequence):
        return np.random.default_rng(sequence).integers(0, 37, self.lengths[sequence])

    def labels(self, sequence):
        labels = np.random.default_rng(100 + sequence).integers(0, 37, self.lengths[sequence])
        labels[sequence::3] = -100
        return labels


def labelled_loss(model, tokens, targets):
    """The same with labels of the corpus, as they are, for every class."""
    source = Labelled()
    sequence = next(i for i, length in enumerate(source.lengths) if length == len(tokens))
    labels = torch.from_numpy(source.labels(sequence))
    counted = labels if getattr(model.config, "is_decoder", False) else labels[1:]
    return model(torch.as_tensor(tokens)[None], labels=labels[None]).loss * int((counted != -100).sum())


@pytest.mark.parametrize("build", [llama, pytest.param(bart, marks=pytest.mark.deep)])
def test_labels_of_the_corpus_are_given_as_the_stock_call_takes_them(ranks, build):
    source = Labelled()
    case = Case(build=build, sum_of_losses=labelled_loss, collator={"labels": source.labels}, sequences=source)
    packs = (Packs(ranks=(0, 1), packs=((0, 2), (1,)), recompute=(True,)),)
    model, total, num_targets = build(), 0.0, 0
    with in_double(), torch.no_grad():
        for sequence in range(len(source.lengths)):
            total += float(labelled_loss(model, source.tokens(sequence), None))
            num_targets += int((source.labels(sequence)[0 if build is bart else 1 :] != -100).sum())
    for losses, _ in ranks(2).run(step_on_ranks, case, packs):
        assert abs(losses[0] - total / num_targets) < EXACT
