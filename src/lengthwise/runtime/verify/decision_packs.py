"""Compare packs in which a forward decides otherwise by its length than in those that were compared before.

Of a pack matters how a forward of as many slots as a rank has of it goes its way, and how one of each of its sequences
does. Packs are compared until every way of the one has met every way of the other.
"""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product

import numpy as np

from lengthwise.core.batch import NEXT_TOKEN
from lengthwise.core.errors import InfeasibleError
from lengthwise.core.pipeline_config import Method
from lengthwise.runtime.loop.prepared_model import PreparedModel
from lengthwise.runtime.loop.synthetic_batches import traced_lengths
from lengthwise.runtime.verify.compute_settings import WORK, ComputeSetting, settings_of, within
from lengthwise.runtime.verify.gradient_check import compare_settings
from lengthwise.runtime.verify.length_decisions import UNKNOWN, LengthDecisions
from lengthwise.runtime.verify.longest_check import slots_of_a_forward
from lengthwise.runtime.verify.precision import Tolerance, compare_precisely
from lengthwise.runtime.verify.verdict import NotInThisDtype
from lengthwise.runtime.verify.zero_weights import Fill

_log = logging.getLogger("lengthwise")

MOST_PACKS = 12
"""Packs of one degree that are compared for their ways."""
MOST_SIZES = 64
"""Sizes of a pack that are tried, until one consists of sequences as they are wanted."""
MANY_DIVISORS = (3600, 1764, 900, 144, 36)
"""Sizes of packs, squares of many divisors, for models whose decisions are not all seen."""
MOST_UNSEEN = 2
"""How many of them are compared, with as many of the lengths that most sequences have."""
MOST_LENGTHS = 64
"""Different lengths of sequences that are in packs then."""


class PackWays:
    """Which ways of packs and sequences have met in packs that were compared."""

    def __init__(self, run: PreparedModel, slots: np.ndarray) -> None:
        """``slots``: [S] those of each sequence of the corpus."""
        self._run, self._decisions = run, LengthDecisions(run=run)
        shortest = 2 if run.collator.objective == NEXT_TOKEN else 1  # one slot has no next token to learn
        lengths, counts = np.unique(slots[slots >= shortest], return_counts=True)
        self._of_corpus, self._usual = lengths, lengths[np.argsort(-counts, kind="stable")[:MOST_LENGTHS]]
        self._compared = list[ComputeSetting]()

    def compare(
        self,
        *,
        degrees: Sequence[int],
        methods: Sequence[Method],
        recompute: Sequence[str],
        largest: int,
        is_crowded: bool = False,
    ) -> None:
        """Compare packs of at most ``largest`` slots whose ways have not met; every rank calls this.

        ``recompute``: as in the packs that were compared before. ``is_crowded``: whether a pack of that size with many
        short sequences was compared too.

        Raises:
            CheckError: loss or gradients differ by more than rounding.
        """
        run, longest = self._run, self._run.collator.longest
        if run.wrapped_model.by_sequence is not None or longest is None or not len(self._of_corpus):
            return
        if not self._compared:
            before = settings_of(run, degrees=degrees, methods=methods, recompute=recompute, longest=longest)
            self._compared = [replace(s, lengths=within(run.wrapped_model.most_slots, s.lengths)) for s in before]
        ways = np.concatenate([[UNKNOWN], self._decisions.ways_of(np.arange(1, max(largest, longest) + 1))])
        ways[1] = ways.max() + 1  # one token is often computed in a way of its own
        settings = list[ComputeSetting]()
        for degree in sorted({1, max(degrees)}):
            packs = _PacksOfDegree(ways, self._of_corpus, degree=degree, largest=largest, longest=longest)
            compared = [s.lengths for s in self._compared if s.degree == degree]
            if is_crowded and degree == 1 and all(way.is_whole for way in self._decisions.ways):
                short = traced_lengths(run.collator)
                compared.append(short * (largest // sum(short)))
            chosen = packs.missing(compared)
            if self._decisions.is_lost or UNKNOWN in ways[2:]:
                chosen += packs.unseen(self._usual, slots_of_a_forward(run))
            settings += [self._setting(lengths, degree, methods[0]) for lengths in dict.fromkeys(chosen)]
        for setting in settings:
            self._compare(setting)

    def is_new(self, lengths: np.ndarray) -> np.ndarray:
        """[L] for each of ``lengths``, whether the forward decides otherwise there than at every length compared."""
        of_corpus = self._decisions.known_ways(self._of_corpus)
        return ~np.isin(self._decisions.known_ways(lengths), of_corpus) | (lengths == 1)  # as in compare

    def _setting(self, lengths: tuple[int, ...], degree: int, method: Method) -> ComputeSetting:
        work = WORK.get(self._run.world.device.type, WORK["cuda"])
        has_gradients = sum(lengths) * self._run.num_params <= work
        return ComputeSetting(lengths=lengths, degree=degree, method=method, gradients=has_gradients)

    def _compare(self, setting: ComputeSetting) -> None:
        """Compare one pack, if it is not too much."""
        if setting in self._compared:
            return
        self._compared.append(setting)
        if sum(setting.lengths) > slots_of_a_forward(self._run) * setting.degree:
            _log.debug("not compared, for the time that it would take: %s", setting)
            return
        _log.debug("a forward decides by its length, so compared are %s", setting)
        try:
            compare_precisely(self._run, partial(_compare, self._run, setting))
        except InfeasibleError as error:
            _log.debug("not compared: %s", error)


def _compare(run: PreparedModel, setting: ComputeSetting, tolerance: Tolerance, fill: Fill) -> None:
    try:
        compare_settings(run, [setting], tolerance, fill)
    except InfeasibleError as error:
        raise NotInThisDtype(error) from None


class _PacksOfDegree:
    """Finds packs by the ways of their sequences, and of the slots that each of some ranks has."""

    def __init__(self, ways: np.ndarray, of_corpus: np.ndarray, *, degree: int, largest: int, longest: int) -> None:
        """``ways``: [1 + slots] by number of slots; ``of_corpus``: the lengths of sequences."""
        self._ways, self._degree, self._most = ways, degree, largest // degree
        self._shortest_of = {int(way): int(of_corpus[ways[of_corpus] == way][0]) for way in np.unique(ways[of_corpus])}
        lengths = np.arange(2, longest + 1)
        self._others = lengths[np.isin(ways[lengths], list(self._shortest_of))]
        """Lengths of further sequences, which go the way of one in the corpus."""

    def missing(self, compared: Iterable[tuple[int, ...]]) -> list[tuple[int, ...]]:
        """Lengths of packs in which those ways meet that meet in none of the packs ``compared``."""
        met, packs = {pair for lengths in compared for pair in self._met_in(lengths)}, list[tuple[int, ...]]()
        for way in dict.fromkeys(self._ways[2 : self._most + 1].tolist()):
            sizes = self._degree * (2 + np.flatnonzero(self._ways[2 : self._most + 1] == way))
            left = sorted(length for other, length in self._shortest_of.items() if (way, other) not in met)
            while left and len(packs) < MOST_PACKS:
                pack, num_taken = self._pack(left, sizes)
                packs += [pack] if pack else []
                left = left[max(1, num_taken) :]
        return packs

    def unseen(self, usual: np.ndarray, most_slots: int) -> list[tuple[int, ...]]:
        """Lengths of packs for decisions that are not seen, of at most ``most_slots`` slots: those that hold the
        ``usual`` lengths, and some that a forward may treat as it treats multiples or squares.
        """
        most_slots, few = min(most_slots, self._degree * self._most), sorted(usual[:MOST_UNSEEN].tolist())
        packs = [sorted(pack) for pack in _in_packs(usual.tolist(), most_slots)[:MOST_PACKS]]
        sizes = [self._degree * size for size in MANY_DIVISORS if sum(few) < self._degree * size <= most_slots]
        of_divisors = [pack for size in sizes if (pack := self._filled(few, size))]
        return [*(tuple(pack) for pack in packs if len(pack) > 1), *of_divisors[:MOST_UNSEEN]]

    def _met_in(self, lengths: tuple[int, ...]) -> set[tuple[int, int]]:
        """Pairs of the way of a rank's slots, and that of a sequence, in a pack."""
        total = sum(lengths)
        sizes = {total // self._degree, -(-total // self._degree)}
        of_sizes, of_lengths = (
            {int(self._ways[number]) for number in numbers if 0 < number < len(self._ways)}
            for numbers in (sizes, lengths)
        )
        return set(product(of_sizes, of_lengths))

    def _pack(self, wanted: list[int], sizes: np.ndarray) -> tuple[tuple[int, ...], int]:
        """A pack of one of ``sizes`` with as many of the ``wanted`` lengths as fit, and their number; the shortest
        first."""
        for num_taken in range(len(wanted), 0, -1):
            taken = wanted[:num_taken]
            for size in sizes[sizes > sum(taken)][:MOST_SIZES].tolist():
                if pack := self._filled(taken, size):
                    return pack, num_taken
        return (), 0

    def _filled(self, lengths: list[int], size: int) -> tuple[int, ...]:
        """The lengths, and others up to ``size`` slots; nothing, if there are none."""
        pack, rest = list(lengths), size - sum(lengths)
        while rest > 0:
            fitting = self._others[(self._others == rest) | (self._others <= rest - 2)]
            if not len(fitting):
                return ()
            pack.append(int(fitting[-1]))
            rest -= pack[-1]
        return tuple(pack) if not rest else ()


def _in_packs(lengths: list[int], most_slots: int) -> list[list[int]]:
    """The lengths in packs of at most ``most_slots`` slots, each in the first that has room; the longest first."""
    packs = list[list[int]]()
    for length in sorted(lengths, reverse=True):
        pack = next((pack for pack in packs if sum(pack) + length <= most_slots), None)
        if pack is None:
            packs.append([length])
        else:
            pack.append(length)
    return packs
