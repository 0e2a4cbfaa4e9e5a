"""Modules of one's own, whose code knows nothing of packs, train as their own loops do."""

import sys
from functools import partial
from types import ModuleType

import pytest
import torch
from torch.nn import functional as F

from lengthwise.core.batch import EVERY_TOKEN, MASKED
from lengthwise.runtime.models.targets import TokenMasking
from lengthwise.runtime.wrap.flash_kernels import ends_within
from tests.runtime.loop import modules
from tests.runtime.loop.modules import (
    CHANNELS,
    GPT,
    PLACES,
    VOCAB,
    Flash,
    Llama,
    Tagger,
    TorchEncoder,
    UnevenHeads,
    Video,
)
from tests.runtime.loop.runs import Case, Frames, Packs, assert_exact, randomised, shard_of, step_on_ranks
from tests.runtime.loop.test_families import AT_TWO

DEGREES = (
    Packs(ranks=(0, 1, 2, 3), packs=((2, 3), (6,), (0, 8)), recompute=(True, False, True)),
    Packs(ranks=(0, 1, 2), packs=((4, 1),), phase=1),
    Packs(ranks=(3,), packs=((5,), (7,)), recompute=(False, True), phase=1),
    Packs(ranks=(1, 2), packs=((9,),), phase=2),
    Packs(ranks=(0,), packs=(), phase=2),
    Packs(ranks=(3,), packs=(), phase=2),
)
MASKING = TokenMasking(seed=3, vocab_size=VOCAB, mask_token_id=1)


def built(model_class, *args, **options):
    torch.manual_seed(0)
    return randomised(model_class(*args, **options))


def gpt_losses(model, tokens, targets):
    tokens = torch.as_tensor(tokens)[None]
    if tokens.shape[1] < 2:
        return 0.0 * model(tokens)[0].sum()
    targets = torch.cat([tokens[:, 1:], torch.full((1, 1), -1)], dim=1)
    return model(tokens, targets)[1] * (tokens.shape[1] - 1)


def next_token_losses(model, tokens, targets):
    tokens = torch.as_tensor(tokens)
    return F.cross_entropy(model(tokens[None])[0, :-1], tokens[1:], reduction="sum")


def masked_losses(model, tokens, targets):
    return F.cross_entropy(model(torch.as_tensor(tokens)[None])[0], targets, reduction="sum")


def logits_loss(output, micro_batch):
    return F.cross_entropy(output[0], micro_batch.targets)


def gpt_case(mask):
    build = partial(built, GPT, mask=mask)
    if mask == "none":
        return Case(build=build, sum_of_losses=gpt_masked, objective=MASKED, masking=MASKING, **IGNORES)
    return Case(build=build, sum_of_losses=gpt_losses, **IGNORES)


def gpt_masked(model, tokens, targets):
    return F.cross_entropy(model(torch.as_tensor(tokens)[None])[0][0], targets, reduction="sum")


IGNORES = {"collator": {"ignore_index": -1}}
LOGITS = {"sum_of_losses": next_token_losses, "loss": logits_loss}
BOTH_WAYS = {"sum_of_losses": masked_losses, "loss": logits_loss, "objective": MASKED, "masking": MASKING}


@pytest.mark.parametrize(
    "mask", ["bool", *(pytest.param(m, marks=pytest.mark.deep) for m in ("none", "is_causal", "float", "buffer"))]
)
def test_a_gpt_with_its_loss_inside_and_any_causal_mask_is_exact_at_degrees_1_to_4(ranks, mask):
    case = gpt_case(mask)
    for found in ranks(4).run(step_on_ranks, case, DEGREES):
        assert_exact(case, found, mask)


@pytest.mark.first_cells(1)
@pytest.mark.parametrize(
    "case",
    [
        Case(build=partial(built, Llama), **LOGITS),
        pytest.param(Case(build=partial(built, TorchEncoder, True, True), **LOGITS), marks=pytest.mark.deep),
        Case(build=partial(built, TorchEncoder, True, False), **LOGITS),
        pytest.param(Case(build=partial(built, TorchEncoder, False, True), **BOTH_WAYS), marks=pytest.mark.deep),
        pytest.param(Case(build=partial(built, Tagger), **BOTH_WAYS), marks=pytest.mark.deep),
        Case(build=partial(built, UnevenHeads), **LOGITS),
    ],
    ids=[
        "rotary tables",
        "causal encoder",
        "slots first",
        "encoder both ways",
        "own multihead",
        "other sizes of values",
    ],
)
def test_tables_tuples_and_layers_of_torch_are_exact_at_degrees_1_to_4(ranks, case):
    for found in ranks(4).run(step_on_ranks, case, DEGREES):
        assert_exact(case, found)


VIDEO_PACKS = (
    Packs(ranks=(0, 1, 2, 3), packs=((1, 0), (4,)), recompute=(True, False)),
    Packs(ranks=(0, 1, 2), packs=((5, 2),), phase=1),
    Packs(ranks=(3,), packs=((3,), (6,)), recompute=(False, True), phase=1),
)


def noised(micro_batch):
    frames = torch.cat([torch.as_tensor(sequence) for sequence in micro_batch.sequences])
    return {"x": micro_batch.own(frames)[None]}


def video_loss(output, micro_batch):
    return F.mse_loss(output[0], noised(micro_batch)["x"][0].roll(1, dims=-1), reduction="none").mean(-1).mean()


def video_losses(model, frames, targets):
    x = torch.as_tensor(frames)
    return F.mse_loss(model(x[None])[0], x.roll(1, dims=-1), reduction="none").mean(-1).sum()


def video_case(**options):
    return Case(
        build=partial(built, Video, **options),
        sum_of_losses=video_losses,
        loss=video_loss,
        inputs=noised,
        objective=EVERY_TOKEN,
        collator={"slot_tokens": PLACES},
        sequences=Frames((4, 7, 1, 2, 9, 3, 1), PLACES, CHANNELS),
    )


def test_a_video_model_that_attends_across_frames_and_within_is_exact_at_degrees_1_to_4(ranks):
    case = video_case()
    for found in ranks(4).run(step_on_ranks, case, VIDEO_PACKS):
        assert_exact(case, found)


REAL = modules.flash_attn_varlen_func


def varlen_attn(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1)):
    causal = window_size[1] == 0
    return REAL(
        query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, 0.0, scale, causal, (window_size[0], -1)
    )  # fmt: skip


def step_with_flash(case, packs, kernel):
    """With a kernel as if it had been imported from where it lives."""
    import torch.nn.attention.varlen as varlen

    fake, before = ModuleType("flash_attn"), varlen.varlen_attn
    try:
        if kernel == "flash_attn":
            sys.modules["flash_attn"] = fake
            fake.flash_attn_varlen_func = REAL
        else:
            varlen.varlen_attn = varlen_attn
            modules.flash_attn_varlen_func = _by_varlen
        found = step_on_ranks(case, packs)
        assert sys.modules[modules.__name__].flash_attn_varlen_func in (REAL, _by_varlen), "put back"
        return found
    finally:
        sys.modules.pop("flash_attn", None)
        varlen.varlen_attn, modules.flash_attn_varlen_func = before, REAL


def _by_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, max_q, max_k, softmax_scale, causal, window_size):
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_q, max_k, scale=softmax_scale, window_size=(window_size[0], 0)
    )  # fmt: skip


@pytest.mark.parametrize(
    ("kernel", "window"),
    [pytest.param("flash_attn", (-1, -1), marks=pytest.mark.deep), ("flash_attn", (4, 0)), ("torch", (-1, 0))],
)
def test_flash_kernels_are_met_where_the_model_imported_them(ranks, kernel, window):
    case = Case(build=partial(built, Flash, window), **LOGITS)
    for found in ranks(2).run(step_with_flash, case, AT_TWO, kernel):
        assert_exact(case, found, kernel)


def test_ends_of_sequences_that_a_kernel_is_given_lie_between_those_of_the_pack():
    shard = shard_of((4, 5), rank=0, degree=1)
    for ends in ([0, 9], [0, 4, 9], [0, 4]):
        assert ends_within(torch.tensor(ends), shard) == ""
    assert ends_within(torch.tensor([0, 2, 4, 6, 9]), shard) == "2, 6"
