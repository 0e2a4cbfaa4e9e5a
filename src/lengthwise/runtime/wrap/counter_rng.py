"""Counter-based RNG keyed by (seed, step, call, sequence, position), so that draws do not depend on sharding.

Calls are numbered over all forwards of a micro-batch, so that two forwards of it draw other numbers.

Whoever computes a token, at whatever degree, in whatever pack and however often, draws the same for it. (The published
code of data-centric parallel draws from each rank's own generator, so that the ranks of a group may train on different
noise for one sample.) The hash is the finaliser of SplitMix64 (Steele et al. 2014), applied word by word. Numbers are
drawn for some slots at a time, since their 64 bits take more memory than what is made of them.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from lengthwise.runtime.wrap.context import PackShard

_GOLDEN = 0x9E3779B97F4A7C15
_MIX = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_WORD = (1 << 64) - 1
_SLOTS, _WEIGHTS, _SEQUENCES = range(3)
"""Domains of the key: slots, attention weights, whole sequences."""
ONE_NUMBER: tuple[tuple[Any, ...], ...] = (([],), ((),), (1,), ([1],), ((1,),))
"""Arguments of ``torch.rand`` that ask for a single number, as layer drop does."""
CHUNK = 1 << 22
"""Numbers drawn at once."""


def _signed(value: int) -> int:
    """Convert an unsigned 64-bit word to the int64 with the same bits."""
    value &= _WORD
    return value - (1 << 64) if value >> 63 else value


def _shift(x: Tensor, bits: int) -> Tensor:
    """Shift int64 to the right logically."""
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def mix(x: Tensor) -> Tensor:
    """A bijection of int64 whose every output bit depends on every input bit."""
    x = x + _signed(_GOLDEN)
    x.bitwise_xor_(_shift(x, 30)).mul_(_signed(_MIX[0]))
    x.bitwise_xor_(_shift(x, 27)).mul_(_signed(_MIX[1]))
    return x.bitwise_xor_(_shift(x, 31))


def mix_word(x: int) -> int:
    """:func:`mix` of one word, its 64 bits as a number that is not negative."""
    x = (x + _GOLDEN) & _WORD
    x = ((x ^ (x >> 30)) * _MIX[0]) & _WORD
    x = ((x ^ (x >> 27)) * _MIX[1]) & _WORD
    return x ^ (x >> 31)


def _key(shard: PackShard, *words: int) -> int:
    state = mix_word(shard.seed & _WORD)  # or seed and step would count by their exclusive or alone
    for word in (shard.step, *words):
        state = mix_word(state ^ (word & _WORD))
    return _signed(state)


def uniform(bits: Tensor) -> Tensor:
    """Numbers in [0, 1) of 53 random bits each."""
    return _shift(bits, 11).to(torch.float64) * 2.0**-53


def exceeds(bits: Tensor, p: float) -> Tensor:
    """Whether :func:`uniform` of ``bits`` is at least ``p``, exactly."""
    return _shift(bits, 11) >= math.ceil(p * 2.0**53)


def _chunks(shard: PackShard, call: int, num_numbers: int) -> Iterator[Tensor]:
    """[some slots, num_numbers] int64, slot after slot of this rank, for the call numbered ``call``."""
    of_slot = mix(mix(shard.sequences ^ _key(shard, _SLOTS, call)) ^ shard.positions)
    numbers = torch.arange(num_numbers, device=shard.device)
    for some in of_slot.split(max(1, CHUNK // max(1, num_numbers))):
        yield mix(some[:, None] ^ numbers)


def _draw(
    x: Tensor, dim: int, call: int, shard: PackShard, make: Callable[[Tensor], Tensor], *, words: int = 1
) -> Tensor:
    """Apply ``make`` to ``words`` random words for each number of ``x``, whose slots lie along ``dim``."""
    moved = x.movedim(dim, 0)
    made = [make(bits) for bits in _chunks(shard, call, words * (moved[0].numel() if len(moved) else 0))]
    flat = torch.cat(made) if made else torch.empty(0, device=x.device)
    return flat.view(moved.shape).movedim(0, dim)


def keep_like(x: Tensor, dim: int, p: float, call: int, shard: PackShard) -> Tensor:
    """Booleans like ``x``, whose slots lie along ``dim``: the numbers that dropout of probability ``p`` keeps."""
    return _draw(x, dim, call, shard, lambda bits: exceeds(bits, p))


def normal_like(x: Tensor, dim: int, call: int, shard: PackShard) -> Tensor:
    """Standard normal numbers like ``x``, whose slots lie along ``dim`` (Box & Muller 1958)."""

    def make(bits: Tensor) -> Tensor:
        pairs = uniform(bits).unflatten(1, (-1, 2))
        radius = (-2.0 * torch.log1p(-pairs[..., 0])).sqrt()
        return (radius * torch.cos(2.0 * math.pi * pairs[..., 1])).to(x.dtype)

    return _draw(x, dim, call, shard, make, words=2)


def uniform_like(x: Tensor, dim: int, call: int, shard: PackShard) -> Tensor:
    """Uniform numbers in [0, 1) like ``x``, whose slots lie along ``dim``."""
    return _draw(x, dim, call, shard, lambda bits: _below_one(uniform(bits), x.dtype))


def _below_one(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast numbers in [0, 1) to ``dtype`` without rounding any up to 1."""
    return numbers.to(dtype).clamp_(max=1.0 - torch.finfo(dtype).eps / 2)


def attention_keep(
    shard: PackShard, sequence: int, call: int, first_head: int, p: float, num_heads: int, queries: range, keys: range
) -> Tensor:
    """[num_heads, queries, keys] booleans: the attention weights that dropout of probability ``p`` keeps."""

    def along(numbers: range) -> Tensor:
        return torch.arange(numbers.start, numbers.stop, device=shard.device)

    heads = mix(along(range(first_head, first_head + num_heads)) ^ _key(shard, _WEIGHTS, call, sequence))
    rows = mix(heads[:, None] ^ along(queries))
    return exceeds(mix(rows[:, :, None] ^ along(keys)), p)


def normal_slots(shard: PackShard, shape: tuple[int, ...], call: int) -> Tensor:
    """``[t, *shape]`` standard normal numbers for each slot, independent of the draws within the model's forward."""
    return normal_like(torch.empty(shard.num_slots, *shape, device=shard.device), 0, -1 - call, shard)


def uniform_sequences(shard: PackShard, call: int) -> Tensor:
    """[t] a uniform number in [0, 1) for the sequence of each slot."""
    bits = mix(shard.sequences ^ _key(shard, _SEQUENCES, call))
    return _below_one(uniform(bits), torch.float32)


def one_number(value: float, size: Any, *, generator: Any = None, **options: Any) -> Tensor:
    """Return what ``torch.rand(size)`` would if it drew ``value``, without drawing."""
    return torch.full(size if isinstance(size, Sequence) else (size,), value, **options)


def attend_rows_dropping(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    p: float,
    causal: bool,
    scale: float | None,
    dim: int,
    call: int,
    shard: PackShard,
) -> Tensor:
    """Attention within every slot, the slots along ``dim``, whose weights are dropped with probability ``p``."""
    groups = query.shape[-3] // key.shape[-3]
    key, value = (x if groups == 1 else x.repeat_interleave(groups, dim=-3) for x in (key, value))
    logits = (query @ key.transpose(-1, -2)) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        mask = torch.ones(logits.shape[-2:], dtype=torch.bool, device=logits.device).tril()
    if mask is not None:
        logits = logits.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else logits + mask
    weights = logits.softmax(-1)
    keep = keep_like(weights, dim, p, call, shard)
    return (weights * keep / (1.0 - p)) @ value
