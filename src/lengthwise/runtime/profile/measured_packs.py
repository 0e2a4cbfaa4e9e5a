"""The packs that a profile of a prepared model measures."""

from collections.abc import Sequence

SHORTEST = 32
"""Slots of the shortest sequence measured, where sequences are much longer."""
FEWEST = 3
"""Packs that are measured whatever time they take: three coefficients need as many."""
MOST_SEQUENCES = 256
"""Most sequences in the pack of many short ones."""


def ladder(longest: int, *, degree: int, slot_tokens: int = 1) -> list[tuple[int, ...]]:
    """Packs of one sequence, of doubling length, the shortest first, in tokens; every rank has slots of each."""
    slots = [max(1, longest // slot_tokens)]
    shortest = max(degree, min(SHORTEST, slots[0] // 8))
    while slots[-1] // 2 >= shortest:
        slots.append(slots[-1] // 2)
    return [(number * slot_tokens,) for number in reversed(slots)]


def many_short(measured: Sequence[tuple[int, ...]], *, slot_tokens: int = 1) -> tuple[int, ...]:
    """A pack with about as many tokens as the second longest of the lone sequences, of many short ones; () of one slot.

    It tells what a token costs from what a micro-batch does. Its neighbours differ in length, as those of other packs
    do: attention on a CPU computes runs of equally long sequences in one call.
    """
    slots = [lengths[0] // slot_tokens for lengths in measured]
    total = slots[max(0, len(slots) - 2)]
    short = max(1, min(slots[min(1, len(slots) - 1)], total // 2))
    number = min(MOST_SEQUENCES, total // short)
    if number < 2:
        return ()
    return tuple(slot_tokens * (short if place % 2 else max(1, short - 1)) for place in range(number))


def packs_of_corpus(slots: Sequence[int], longest: int, *, slot_tokens: int = 1) -> list[tuple[int, ...]]:
    """Packs in tokens, the smallest first, for a model that fails with sequences of other lengths than its corpus has.

    Single sequences, and as there may be few different lengths, packs of several of the shortest.

    Args:
        slots: some lengths of the corpus.
        longest: tokens of its longest sequence.
        slot_tokens: tokens of a slot.
    """
    lengths = sorted({*slots, max(1, longest // slot_tokens)})
    packs: list[tuple[int, ...]] = [(number * slot_tokens,) for number in lengths]
    packs += [(lengths[0] * slot_tokens,) * count for count in (2, 4)]
    return sorted(packs, key=sum)
