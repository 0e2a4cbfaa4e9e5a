"""Random numbers of a token, not of a rank: functions of seed, step, call, sequence and position alone.

Whoever computes a token, at whatever degree, in whatever pack and however often, draws the same for it. (The published
code of data-centric parallel draws from each rank's own generator, so that the ranks of a group may train on different
noise for one sample.) The hash is the finaliser of SplitMix64 (Steele et al. 2014), applied word by word.
"""

import math

import torch
from torch import Tensor

from lengthwise.runtime.adapt.shard import Shard

_GOLDEN = 0x9E3779B97F4A7C15
_MIX = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


def _signed(value: int) -> int:
    """The int64 with the same bits."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical shift to the right of int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def mix(x: Tensor) -> Tensor:
    """A bijection of int64 whose every output bit depends on every input bit."""
    x = x + _signed(_GOLDEN)
    x = (x ^ _shift(x, 30)) * _signed(_MIX[0])
    x = (x ^ _shift(x, 27)) * _signed(_MIX[1])
    return x ^ _shift(x, 31)


def _key(shard: Shard, *words: int) -> int:
    state = torch.tensor(_signed(shard.seed))
    for word in (shard.step, *words):
        state = mix(state ^ _signed(word))
    return int(state)


def uniform(bits: Tensor) -> Tensor:
    """Numbers in [0, 1) of 53 random bits each."""
    return _shift(bits, 11).to(torch.float64) * 2.0**-53


def slot_bits(shard: Shard, call: int, num_numbers: int) -> Tensor:
    """[t, num_numbers] int64: of every slot of this rank, for the call numbered ``call``."""
    of_slot = mix(mix(shard.sequences ^ _key(shard, call)) ^ shard.positions)
    return mix(of_slot[:, None] ^ torch.arange(num_numbers, device=shard.device))


def keep_like(x: Tensor, dim: int, p: float, call: int, shard: Shard) -> Tensor:
    """Which numbers of ``x``, whose slots lie along ``dim``, dropout of probability ``p`` leaves: booleans."""
    moved = x.movedim(dim, 0)
    bits = slot_bits(shard, call, moved[0].numel())
    return (uniform(bits) >= p).view(moved.shape).movedim(0, dim)


def normal_like(x: Tensor, dim: int, call: int, shard: Shard) -> Tensor:
    """Standard normal numbers like ``x``, whose slots lie along ``dim`` (Box & Muller 1958)."""
    moved = x.movedim(dim, 0)
    pairs = uniform(slot_bits(shard, call, 2 * moved[0].numel())).view(*moved.shape, 2)
    radius = (-2.0 * torch.log1p(-pairs[..., 0])).sqrt()
    return (radius * torch.cos(2.0 * math.pi * pairs[..., 1])).to(x.dtype).movedim(0, dim)


def uniform_like(x: Tensor, dim: int, call: int, shard: Shard) -> Tensor:
    """Uniform numbers in [0, 1) like ``x``, whose slots lie along ``dim``."""
    moved = x.movedim(dim, 0)
    return uniform(slot_bits(shard, call, moved[0].numel())).view(moved.shape).to(x.dtype).movedim(0, dim)


def attention_keep(
    shard: Shard, sequence: int, call: int, first_head: int, p: float, num_heads: int, queries: range, keys: range
) -> Tensor:
    """[num_heads, queries, keys] booleans: the weights of attention that dropout of probability ``p`` leaves."""
    def along(numbers: range) -> Tensor:
        return torch.arange(numbers.start, numbers.stop, device=shard.device)

    heads = mix(along(range(first_head, first_head + num_heads)) ^ _key(shard, call, sequence))
    rows = mix(heads[:, None] ^ along(queries))
    return uniform(mix(rows[:, :, None] ^ along(keys))) >= p


def normal_slots(shard: Shard, shape: tuple[int, ...], call: int) -> Tensor:
    """``[t, *shape]`` standard normal numbers of every slot; apart from the draws within the model's forward."""
    return normal_like(torch.empty(shard.num_slots, *shape, device=shard.device), 0, -1 - call, shard)


def uniform_sequences(shard: Shard, call: int) -> Tensor:
    """[t] a number in [0, 1) of the sequence of every slot."""
    return uniform(mix(shard.sequences ^ _key(shard, -1 - call))).to(torch.float32)
