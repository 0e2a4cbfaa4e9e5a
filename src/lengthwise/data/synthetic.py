"""Lengths drawn from published distributions, for questions asked before there is a corpus.

Real lengths are better: index them, or save one integer a sequence with ``numpy.save``. Every distribution here is a
stand-in, made to match what a paper says of its data. A draw is a function of name, seed and number of sequences alone:
sequence i comes from raw Philox outputs 2 i and 2 i + 1 (whose stream NumPy guarantees), so fewer sequences are the
first ones of more. The first sequence alone is not drawn: it has the longest length that is published of the data, so
that a sample of any size reaches as far as the data does.
"""

from collections.abc import Callable
from math import log

import numpy as np

from lengthwise.core.errors import InputError
from lengthwise.core.wording import nearest

SHORTEST = 16
"""Tokens; where a published histogram begins at 0."""
DOCUMENTS = ((0.95, 420.0, 1.0), (0.05, 1500.0, 1.25))
"""Share, median in tokens and sigma of log-normal parts whose longest sequence among 1.6M tokens lies between 15K and
32K, as Hydraulis' figure 14 shows of CommonCrawl (mean 0.8K tokens)."""
DOCUMENTS_LONGEST = 32_768
"""The context length of that figure; longer ones are cut there."""

# ParaDySe, table 3: shares of the sequences in per cent between these lengths, and the longest sequence.
EDGES = (0, 4096, 8192, 16_384, 32_768, 65_536, 131_072)
GITHUB_CODE = ((65.7, 14.5, 9.8, 5.1, 2.7, 1.1, 1.1), 309_000)
GRCH38 = ((3.5, 26.4, 28.7, 21.2, 11.9, 5.5, 1.9), 624_000)

# The public benchmark of DCP: tokens of a video or an image, and how many of them.
IMAGES = ((144, 39_003), (405, 24_562), (920, 16_454), (1590, 11_556), (3600, 8425))
VIDEOS = (
    (2160, 592), (6075, 373), (4320, 250), (13_800, 176), (12_150, 128), (23_850, 96), (8640, 74), (27_600, 58),
    (54_000, 47), (24_300, 38), (47_700, 31), (17_280, 26), (55_200, 22), (108_000, 19), (48_600, 16), (95_400, 14),
    (110_400, 12), (216_000, 11), (190_800, 9), (432_000, 8),
)  # fmt: skip

Draw = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""Lengths from two arrays of uniform numbers in (0, 1): one that chooses, one that ranks within the choice."""

NAMES = {
    "commoncrawl": "web text of 0.8K tokens on average, to 32K (Hydraulis, figure 14)",
    "githubcode": "source files, 66 % below 4K, the longest of 309K (ParaDySe, table 3)",
    "grch38": "genome in 3-mers, 3.5 % below 4K, the longest of 624K (ParaDySe, table 3)",
    "dcp-short": "images and 2 % videos, most of the tokens in sequences below 4K (DCP's benchmark)",
    "dcp-balanced": "the same 25 lengths, each with as many tokens as every other",
    "dcp-long": "the videos alone, 2K to 432K",
}
"""Name -> what it is like."""
LONGEST = {
    "commoncrawl": DOCUMENTS_LONGEST,
    "githubcode": GITHUB_CODE[1],
    "grch38": GRCH38[1],
    **dict.fromkeys(("dcp-short", "dcp-balanced", "dcp-long"), max(length for length, _ in VIDEOS)),
}
"""Name -> the longest published sequence, in tokens."""


def synthetic_lengths(name: str, num_sequences: int, seed: int = 0) -> np.ndarray:
    """[num_sequences] int64: lengths in tokens of the distribution called ``name``.

    Raises:
        InputError: there is none; the message suggests the nearest. Or no sequence is asked for, or a negative seed.
    """
    if name not in NAMES:
        raise InputError(f"no synthetic lengths {name!r}; {nearest(name, NAMES)}")
    if num_sequences < 1:
        raise InputError(f"{num_sequences} sequences of synthetic lengths: at least 1 is needed")
    if not 0 <= seed < 1 << 64:
        raise InputError(f"seed {seed} is out of range; use 0 to 2**64 - 1")
    raw = np.random.Philox(key=np.array([seed, 0], dtype=np.uint64)).random_raw(2 * num_sequences)
    uniform = ((raw >> np.uint64(11)) + 0.5) * 2.0**-53
    lengths = _DRAWS[name](uniform[::2], uniform[1::2])
    lengths[0] = LONGEST[name]
    return lengths


def _documents(which: np.ndarray, rank: np.ndarray) -> np.ndarray:
    from scipy.special import ndtri  # slow to import, and of use here alone

    part = _choose(which, [share for share, _, _ in DOCUMENTS])
    median = np.array([log(tokens) for _, tokens, _ in DOCUMENTS])[part]
    sigma = np.array([sigma for _, _, sigma in DOCUMENTS])[part]
    return _whole(np.exp(median + sigma * ndtri(rank)), DOCUMENTS_LONGEST)


def _binned(percent: tuple[float, ...], longest: int) -> Draw:
    """Log-uniform within each bin of ``EDGES``."""
    edges = np.log(np.maximum([*EDGES, longest], SHORTEST))

    def draw(which: np.ndarray, rank: np.ndarray) -> np.ndarray:
        part = _choose(which, percent)
        return _whole(np.exp(edges[part] + rank * (edges[part + 1] - edges[part])), longest)

    return draw


def _listed(counted: tuple[tuple[int, int], ...], *, equal_tokens: bool = False) -> Draw:
    lengths = np.array([length for length, _ in counted], dtype=np.int64)
    shares = [1 / length if equal_tokens else float(count) for length, count in counted]

    def draw(which: np.ndarray, rank: np.ndarray) -> np.ndarray:
        return lengths[_choose(which, shares)]

    return draw


def _choose(uniform: np.ndarray, shares: list[float] | tuple[float, ...]) -> np.ndarray:
    """Which part each number falls into; shares need not sum to 1."""
    ends = np.cumsum(shares)
    return np.searchsorted(ends[:-1] / ends[-1], uniform, side="right")


def _whole(lengths: np.ndarray, longest: int) -> np.ndarray:
    return np.clip(np.rint(lengths), SHORTEST, longest).astype(np.int64)


_DRAWS: dict[str, Draw] = {
    "commoncrawl": _documents,
    "githubcode": _binned(*GITHUB_CODE),
    "grch38": _binned(*GRCH38),
    "dcp-short": _listed((*IMAGES, *VIDEOS)),
    "dcp-balanced": _listed((*IMAGES, *VIDEOS), equal_tokens=True),
    "dcp-long": _listed(VIDEOS),
}
