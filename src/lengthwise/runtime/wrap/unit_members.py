"""Units: groups of sequences that share a micro-batch, planned as one sequence and computed as several.

To sampler and planner a unit is one sequence, as long as all of its members. In a forward each member is a sequence of
its own: positions from 0, attention within it, no label across its border. Where members share what they begin with,
see :mod:`lengthwise.runtime.wrap.shared_prefixes`. Where the loss of the whole step couples them, members need not
share a micro-batch: the planner gets each as a sequence. A unit whose members share what they begin with may be cut in
parts for a step, each of which is planned as one sequence. Units have any number of members each.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from lengthwise.core.batch import Pack


@dataclass(frozen=True, eq=False, kw_only=True)
class Units:
    """The members of every unit: those of unit u are the sequences ``offsets[u]`` to ``offsets[u + 1] - 1``."""

    offsets: np.ndarray
    """[units + 1] the first member of each unit, and the number S of all members."""
    lengths: np.ndarray
    """[S] tokens of every member."""
    are_split: bool = False
    """Whether members are planned as sequences of their own, on whichever ranks; the loss of the step couples them."""
    parts: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """The members of each part of a unit that is cut, by the number that it is planned under."""
    repeated_tokens: int = 0
    """Tokens that a step computes more than once, because several parts of a unit begin with them."""

    @cached_property
    def num_members(self) -> int | None:
        """The number of members that every unit has; None: units have different numbers of members."""
        sizes = np.diff(self.offsets)
        return int(sizes[0]) if len(sizes) and (sizes == sizes[0]).all() else None

    @property
    def sizes_text(self) -> str:
        """How many sequences units have, in words."""
        sizes = np.diff(self.offsets)
        return f"{sizes.min()}" if self.num_members is not None else f"{sizes.min()} to {sizes.max()}"

    def unit_of(self, sequences: Sequence[int]) -> np.ndarray:
        """[s] the unit of each of some sequences."""
        return np.asarray(np.searchsorted(self.offsets, sequences, side="right") - 1)

    def ids(self, units: Sequence[int]) -> list[int]:
        """The numbers of the sequences of some units, unit by unit."""
        bounds = self.offsets
        return [sequence for unit in units for sequence in range(int(bounds[unit]), int(bounds[unit + 1]))]

    def planned(self, number: int) -> list[int]:
        """The numbers of the sequences that are planned as one."""
        if number in self.parts:
            return list(self.parts[number])
        return [number] if self.are_split else self.ids([number])

    def noise_id(self, number: int) -> int:
        """The number that random draws of a planned sequence belong to: of a part, its unit's, however it is cut."""
        return int(self.unit_of(self.parts[number][:1])[0]) if number in self.parts else number

    def planned_units(self, sequences: Sequence[int]) -> tuple[np.ndarray, bool]:
        """[s] which unit of a micro-batch, from 0, each of its sequences is of, and whether all units are whole.

        Sequences that are planned by themselves are units of their own. Before a run there may be more than the corpus
        has, of which it is compared: these are of no unit.
        """
        if self.are_split:
            return np.arange(len(sequences)), True
        of_each = self.unit_of(sequences)
        is_next = np.diff(of_each, prepend=of_each[:1]) != 0
        firsts = of_each[np.flatnonzero(is_next | (np.arange(len(of_each)) == 0))]
        are_known = of_each.max(initial=0) < len(self.offsets) - 1
        return np.cumsum(is_next), are_known and list(sequences) == self.ids(firsts.tolist())

    def name(self, sequence: int, item: int | None = None) -> str:
        """The name of a sequence in error messages; ``item``: the number of its unit, where it has another."""
        unit = int(self.unit_of([sequence])[0])
        return f"member {sequence - int(self.offsets[unit])} of item {unit if item is None else item}"

    def members(self, pack: Pack) -> Pack:
        """The pack of the members of a pack of units, which computes as many tokens: its padding is at the end."""
        if self.are_split:
            return pack
        ids = self.ids(pack.ids)
        lengths = tuple(self.lengths[ids].tolist())
        assert sum(lengths) == sum(pack.lengths), "units are as long as their members"
        return Pack(ids=tuple(ids), lengths=lengths, filler=pack.num_tokens - sum(lengths))
