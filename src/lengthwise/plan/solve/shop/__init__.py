"""Jobs in batches on machines of several types: a fast, deterministic schedule and a proof of how good it is."""

from lengthwise.plan.solve.shop.lower_bound import Certificate, certify
from lengthwise.plan.solve.shop.model import Machines, Objective, SearchEffort, ShopSchedule
from lengthwise.plan.solve.shop.schedule import schedule

__all__ = [
    "Certificate",
    "Machines",
    "Objective",
    "SearchEffort",
    "ShopSchedule",
    "certify",
    "schedule",
]  # fmt: skip
