"""Units: groups of sequences that share a micro-batch, planned as one sequence and computed as several.

To sampler and planner a unit is one sequence, as long as all of its members. In a forward each member is a sequence of
its own: positions from 0, attention within it, no label across its border. Where members share what they begin with,
see :mod:`lengthwise.runtime.wrap.shared_prefixes`. Where the loss of the whole step couples them, members need not
share a micro-batch: the planner gets each as a sequence. M members of every unit.
"""

from dataclasses import dataclass

import numpy as np

from lengthwise.core.batch import Pack


@dataclass(frozen=True, eq=False, kw_only=True)
class Units:
    """The members of every unit: those of unit u are the sequences u M to (u + 1) M - 1."""

    num_members: int
    """The number M of sequences in a unit."""
    lengths: np.ndarray
    """[units M] tokens of every member."""
    are_split: bool = False
    """Whether members are planned as sequences of their own, on whichever ranks; the loss of the step couples them."""

    @property
    def num_together(self) -> int:
        """Sequences of a unit that share a micro-batch, and are planned as one sequence."""
        return 1 if self.are_split else self.num_members

    def name(self, sequence: int) -> str:
        """The name of a sequence in error messages."""
        unit, member = divmod(sequence, self.num_members)
        return f"member {member} of item {unit}"

    def members(self, pack: Pack) -> Pack:
        """The pack of the members of a pack of units, which computes as many tokens: its padding is at the end."""
        if self.are_split:
            return pack
        ids = [unit * self.num_members + member for unit in pack.ids for member in range(self.num_members)]
        lengths = tuple(self.lengths[ids].tolist())
        assert sum(lengths) == sum(pack.lengths), "units are as long as their members"
        return Pack(ids=tuple(ids), lengths=lengths, filler=pack.num_tokens - sum(lengths))
