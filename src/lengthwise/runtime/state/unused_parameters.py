"""Trained parameters that no backward of a step reaches on any rank, which its update leaves as they are.

So does torch, whose optimizers leave out a parameter without a gradient: an expert that no token was routed to, a
branch that was not taken. With a gradient of zero, momentum, averages and weight decay would move it.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from lengthwise.runtime.models.host_copies import to_device


class UnusedParameters:
    """Which parameters of a step have no gradient, and how many updates have left out each."""

    def __init__(self, named: Mapping[str, nn.Parameter]) -> None:
        """Begin to watch the gradients of parameters."""
        self._all = tuple(named)
        self._ignored: frozenset[int] | None = frozenset()
        """Identities of parameters whose gradients do not count; None: of all."""
        self._used: set[str] | None = None
        """Those with a gradient on this rank; None: no step is computed."""
        self.names: frozenset[str] = frozenset()
        """Those of the step that have no gradient on any rank; known once its gradient's norm is."""
        self.times_left_out: Counter[str] = Counter()
        """By how many updates of the optimizer; of others, 0."""
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(partial(self._note_gradient, name))
            for name, parameter in named.items()
        ]

    def _note_gradient(self, name: str, parameter: Tensor) -> None:
        is_ignored = self._ignored is None or id(parameter) in self._ignored
        if self._used is not None and not is_ignored:
            self._used.add(name)

    @contextmanager
    def ignoring(self, ignored: frozenset[int] | None) -> Iterator[None]:
        """Within, gradients of ``ignored`` parameters, by their identities, are no use of them; None: of all.

        Such as the zeros of a backward that has no loss, and runs for the exchanges that other ranks wait for.
        """
        self._ignored = ignored
        try:
            yield
        finally:
            self._ignored = frozenset()

    def begin_step(self) -> None:
        """Begin to note which parameters have gradients."""
        self._used, self.names = set(), frozenset()

    def joined(self, values: Tensor) -> Tensor:
        """``values`` and after them, in a step, for each parameter whether this rank has a gradient of it: 1 or 0."""
        if not self._all or self._used is None:
            return values
        if len(self._used) in (0, len(self._all)):  # nothing to copy to the device
            is_used = torch.full((len(self._all),), bool(self._used), dtype=values.dtype, device=values.device)
        else:
            flags = torch.tensor([name in self._used for name in self._all], dtype=values.dtype)
            is_used = to_device(flags, values.device)
        return torch.cat([values, is_used])

    def note(self, num_uses: Sequence[float]) -> None:
        """Note on how many ranks each parameter has a gradient."""
        self.names = frozenset(name for name, number in zip(self._all, num_uses) if not number)

    def count_update(self) -> None:
        """End the step with an update, which left out its unused parameters."""
        self.times_left_out.update(self.names)
        self._used, self.names = None, frozenset()

    def state_dict(self) -> dict[str, int]:
        """What a checkpoint keeps: how many updates left out a parameter, where any did."""
        return dict(sorted(self.times_left_out.items()))

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on from a checkpoint."""
        self.times_left_out = Counter(state)

    def close(self) -> None:
        """Watch no longer."""
        for hook in self._hooks:
            hook.remove()
