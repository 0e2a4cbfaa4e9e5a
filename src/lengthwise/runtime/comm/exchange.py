"""An exchange among the ranks of a group by its sizes, for a rank that takes part with zeros instead of tensors."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from lengthwise.runtime.comm.group import Group


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """An all-to-all of a group, or a hop of a ring."""

    group: Group
    send: Sequence[int]
    """Numbers that go to each rank; of a hop, to the next one alone."""
    receive: Sequence[int]
    """Numbers that come from each rank; of a hop, from the one before alone."""
    dtype: torch.dtype
    tag: int | None = None
    """The tag of a hop; None: it is an all-to-all."""

    @property
    def reversed(self) -> "Exchange":
        """The exchange of the gradients: what was received is sent."""
        return replace(self, send=self.receive, receive=self.send)

    def issue(self, device: torch.device) -> None:
        """Send zeros, and wait for what comes."""
        zeros = torch.zeros(sum(self.send), dtype=self.dtype, device=device)
        if self.tag is None:
            self.group.all_to_all(zeros, self.send, self.receive)
        else:
            self.group.ring_shift(zeros, self.receive, tag=self.tag).wait()
