"""Updates of which computation hides a share: what plans reckon with where pushes and pulls run beneath passes."""

from lengthwise.core.errors import InputError
from lengthwise.core.one_f_one_b import exposed_update_s
from lengthwise.core.pipeline_config import Strategy
from lengthwise.cost.corrected import CorrectedCost
from lengthwise.cost.separable import SeparableCost


class OverlappedCost(CorrectedCost):
    """``base`` with updates that run beneath computation by a share. A :class:`~lengthwise.core.cost.CostModel`."""

    def __init__(self, base: SeparableCost, overlap: float) -> None:
        """``overlap``: the share, from 0 to 1, as far as passes are long enough; see ``exposed_update_s``.

        Raises:
            InputError: it is no share.
        """
        if not 0 <= overlap <= 1:
            raise InputError(f"overlap is a share of the update between 0 and 1, not {overlap}")
        super().__init__(base)
        self.overlap = overlap

    def update_s(self, strategy: Strategy) -> float:
        """Seconds that are exposed at least, however long the passes are."""
        return (1.0 - self.overlap) * self.base.update_s(strategy)

    def exposed_s(self, strategy: Strategy, cover_s: float) -> float:
        """Seconds that nothing hides where ``cover_s`` seconds of passes may."""
        return exposed_update_s(self.base.update_s(strategy), cover_s, self.overlap)
