"""Imported by tests with models, and what their processes are forked from: profiles measure a pack once by default.

How repeats are taken is tested where they are asked for (``tests/runtime/profile``).
"""

from lengthwise.runtime.profile.two_layer_profile import ProfilingEffort
from lengthwise.session import zero_bubble_costs

ProfilingEffort.__init__.__kwdefaults__["repeats"] = 1
zero_bubble_costs.EFFORT = ProfilingEffort(budget_s=zero_bubble_costs.EFFORT.budget_s)
