"""The cost model of a prepared run: from its profile, measured now or kept from before."""

from typing import TYPE_CHECKING

from lengthwise.api.options import Options
from lengthwise.core.lengths import LengthIndex
from lengthwise.core.specs import ClusterSpec
from lengthwise.cost.separable import SeparableCost

if TYPE_CHECKING:
    from lengthwise.runtime.adapt.run import Run


def find_cost(run: "Run", options: Options, *, cluster: ClusterSpec, lengths: LengthIndex) -> SeparableCost:
    """Costs of the run's model on its ranks."""
    raise NotImplementedError
