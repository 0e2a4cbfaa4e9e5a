"""Random permutations that are the same with every version of NumPy: Philox's raw output, integers and stable sorts."""

import numpy as np

BATCHES = 1
"""Number of the stream that shuffles an epoch's batches; 0 orders its sequences."""


def raw_stream(*, seed: int, epoch: int, number: int = 0) -> np.random.Philox:
    """Raw 64-bit numbers, whose sequence NumPy guarantees; streams of other numbers are 2^192 apart."""
    key, counter = np.array([seed, epoch], dtype=np.uint64), np.array([0, 0, 0, number], dtype=np.uint64)
    return np.random.Philox(key=key, counter=counter)


def epoch_order(num_sequences: int, *, seed: int, epoch: int, number: int = 0) -> np.ndarray:
    """A random permutation of ``num_sequences`` positions: the stable argsort of raw numbers."""
    return np.argsort(raw_stream(seed=seed, epoch=epoch, number=number).random_raw(num_sequences), kind="stable")


def draw(stream: np.random.Philox, count: int, size: int) -> np.ndarray:
    """``count`` different numbers below ``size``, every choice and every order of them as likely.

    O(count log count) whatever the size: numbers drawn again are passed over, and where more than half of all are
    wanted, all are shuffled.
    """
    if 2 * count > size:
        return np.argsort(stream.random_raw(size), kind="stable")[:count]
    distinct = np.empty(0, dtype=np.int64)
    while len(distinct) < count:
        more = stream.random_raw(count + count // 2 + 8) % np.uint64(size)
        distinct = _first_ones(np.concatenate([distinct, more.astype(np.int64)]))
    return distinct[:count]


def _first_ones(numbers: np.ndarray) -> np.ndarray:
    """Every number once, where it was first."""
    order = np.argsort(numbers, kind="stable")
    ascending = numbers[order]
    is_first = np.ones(len(numbers), dtype=bool)
    is_first[1:] = ascending[1:] != ascending[:-1]
    return numbers[np.sort(order[is_first])]
