"""Small models, packs and comparisons shared by the tests of this folder."""

from itertools import pairwise

import torch

from lengthwise.core.batch import Pack
from lengthwise.core.specs import ModelSpec
from lengthwise.runtime.models.registry import build_model
from lengthwise.runtime.models.targets import next_token_targets

# float64 sums over a few hundred terms of order one, in another order: a few hundred ulp of 2e-16.
EXACT = 1e-11


def tiny(**sizes):
    """Two layers with unequal sizes everywhere, so that a transposed or swapped dimension cannot pass."""
    return ModelSpec(
        **{
            "name": "tiny", "num_layers": 2, "hidden_size": 24, "ffn_size": 40, "num_heads": 6, "num_kv_heads": 2,
            "head_size": 8, "vocab_size": 61, **sizes,
        }
    )  # fmt: skip


def tiny_gpt(**sizes):
    """As transformers has them: heads that make up the hidden size."""
    return tiny(
        **{
            "family": "gpt", "gated_ffn": False, "qkv_bias": True, "num_heads": 3, "num_kv_heads": 3,
            "tied_embeddings": True, "max_positions": 128, **sizes,
        }
    )  # fmt: skip


def tiny_bert(**sizes):
    return tiny_gpt(**{"family": "bert", "causal": False, "norm_eps": 1e-12, **sizes})


def model_of(spec, *, seed=0):
    """A float64 model whose norms and biases are random too, so that each of them matters."""
    model = build_model(spec, dtype=torch.float64, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 1:
                weight += 0.3 * torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
            else:
                weight *= 5
    return model


def pack_of(*lengths, padded_to=0):
    return Pack(ids=tuple(range(len(lengths))), lengths=lengths, padded_to=padded_to)


def tokens_of(pack, vocab_size, *, seed=1):
    return torch.randint(vocab_size, (pack.num_tokens,), generator=torch.Generator().manual_seed(seed))


def loss_and_gradients(model, tokens_T, pack, *, targets_T=None, **options):
    model.zero_grad()
    targets_T = next_token_targets(tokens_T, pack) if targets_T is None else targets_T
    loss = model(tokens_T, pack.cu_seqlens, targets_T, **options)
    loss.backward()
    return loss.detach(), {name: weight.grad.clone() for name, weight in model.named_parameters()}


def rows_that_matter(grads):
    """How many rows of each weight have a gradient beyond rounding."""
    return {name: (grad.flatten(1).abs().amax(1) > 1e-9).sum().item() for name, grad in as_matrices(grads).items()}


def as_matrices(grads):
    return {name: grad[:, None] if grad.ndim == 1 else grad for name, grad in grads.items()}


def assert_same(actual, expected, *, tolerance=EXACT):
    """Tensors, or dicts of them, are equal to ``tolerance`` relative to the largest entry."""
    if isinstance(expected, dict):
        assert actual.keys() == expected.keys()
        for name in expected:
            try:
                assert_same(actual[name], expected[name], tolerance=tolerance)
            except AssertionError as error:
                raise AssertionError(f"{name}: {error}") from None
        return
    assert actual.shape == expected.shape
    scale = max(1.0, expected.abs().max().item())
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance * scale)


def sequences(tokens_T, pack):
    """The real tokens of each sequence."""
    return [tokens_T[start : start + length] for (start, _), length in zip(pairwise(pack.cu_seqlens), pack.lengths)]
