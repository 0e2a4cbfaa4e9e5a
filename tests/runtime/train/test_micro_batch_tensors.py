"""From ids to tensors, for both objectives."""

import numpy as np
import pytest
import torch

from lengthwise.core.batch import MASKED, GlobalBatch, Pack
from lengthwise.core.errors import InputError
from lengthwise.core.specs import MODELS
from lengthwise.runtime.models.targets import IGNORE, TokenMasking
from lengthwise.runtime.train.micro_batch_tensors import feed, masking_of
from tests.runtime.models.cases import assert_same, model_of, tiny, tiny_bert, tiny_gpt

CPU = torch.device("cpu")
LENGTHS = {4: 7, 9: 1, 2: 12, 5: 10}
MASKING = TokenMasking(seed=11, vocab_size=61, mask_token_id=60)
LOOKING_BOTH_WAYS = {
    "bert": tiny_bert(),
    "transformer-2d": tiny(family="transformer-2d", gated_ffn=False, causal=False, frame_size=4),
}


class Source:
    def tokens(self, sequence):
        return np.random.default_rng(sequence).integers(0, 60, LENGTHS[sequence]).astype(np.uint16)


def pack_of(*ids, padded_to=0):
    return Pack(ids=ids, lengths=tuple(LENGTHS[id] for id in ids), padded_to=padded_to)


def loss_and_gradients(model, packs):
    model.zero_grad()
    total = 0.0
    for pack in packs:
        fed = feed(Source(), pack, CPU, masking=MASKING)
        loss = model(fed.tokens_T, fed.cu_seqlens, fed.targets_T)
        loss.backward()
        total += loss.item()
    return torch.tensor(total), {name: weight.grad.clone() for name, weight in model.named_parameters()}


def test_next_tokens_are_the_default():
    fed = feed(Source(), pack_of(4, 9), CPU)
    tokens = Source().tokens(4).tolist()
    assert fed.tokens_T.tolist() == [*tokens, *Source().tokens(9).tolist()]
    assert fed.targets_T.tolist() == [*tokens[1:], IGNORE, IGNORE]
    assert fed.cu_seqlens == (0, 7, 8)


def test_padding_is_a_sequence_of_its_own_for_models_that_look_both_ways():
    pack = pack_of(4, 2, padded_to=12)
    assert feed(Source(), pack, CPU).cu_seqlens == (0, 12, 24)
    fed = feed(Source(), pack, CPU, masking=MASKING)
    assert fed.cu_seqlens == (0, 7, 12, 24)
    assert (fed.targets_T[7:12] == IGNORE).all() and (fed.tokens_T[7:12] == 0).all()


@pytest.mark.parametrize("spec", LOOKING_BOTH_WAYS.values(), ids=LOOKING_BOTH_WAYS)
@pytest.mark.parametrize(
    "packs",
    [
        [pack_of(4), pack_of(9), pack_of(2), pack_of(5)],
        [pack_of(5, 2), pack_of(9, 4)],
        [pack_of(2, 9, padded_to=15), pack_of(4, 5, padded_to=10)],
    ],
    ids=["one by one", "in other packs", "padded"],
)
def test_the_masked_gradient_does_not_depend_on_how_a_batch_is_packed(spec, packs):
    model = model_of(spec)
    loss, grads = loss_and_gradients(model, [pack_of(4, 9, 2, 5)])
    other_loss, other_grads = loss_and_gradients(model, packs)
    assert_same(other_loss, loss)
    assert_same(other_grads, grads)


def test_there_are_as_many_targets_as_the_batch_divides_by():
    batch = GlobalBatch(step=0, ids=tuple(LENGTHS), lengths=tuple(LENGTHS.values()), objective=MASKED)
    fed = [feed(Source(), pack, CPU, masking=MASKING) for pack in (pack_of(4, 9, padded_to=9), pack_of(2, 5))]
    assert sum((part.targets_T != IGNORE).sum().item() for part in fed) == batch.num_targets


def test_a_model_says_whether_its_tokens_are_hidden():
    assert masking_of(tiny_gpt(), seed=3) is None
    assert masking_of(tiny_bert(mask_token_id=7), seed=3) == TokenMasking(seed=3, vocab_size=61, mask_token_id=7)
    with pytest.raises(InputError, match="bert-1024 predicts masked tokens and has no mask_token_id"):
        masking_of(MODELS["bert-1024"], seed=3)
