"""Jobs in batches on machines of several types: a fast, deterministic schedule and a proof of how good it is."""

from lengthwise.plan.solve.shop.bound import Certificate, certify, lower_bound_of_classes
from lengthwise.plan.solve.shop.model import Effort, Machines, Objective, Schedule
from lengthwise.plan.solve.shop.schedule import schedule

__all__ = [
    "Certificate", "Effort", "Machines", "Objective", "Schedule", "certify", "lower_bound_of_classes", "schedule",
]  # fmt: skip
