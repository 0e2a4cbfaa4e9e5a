"""How much of a machine a job takes at least, if the machine has to end by a deadline.

Under a deadline C a machine whose largest job has work x holds at most some work Cap(x; C), which does not grow with x.
So the shares w_i / Cap(w_i; C) of the jobs on one machine sum to at most 1, whatever is batched how. That makes every
dispatch and packing, pipeline bubble included, a solution of a linear program. These kinds of share hold:

    work     work over the most work that any number of balanced batches holds
    setup    work plus the setups that sizes force (a batch holds `capacity`), over what the deadline leaves
    size     size over the capacity of all batches that fit (MAX_TIMES_COUNT only: a long batch leaves room for few)
    whole    as setup, but whole batches instead of fractions of one (machines of one stage only; `whole_batches`)
"""

import numpy as np

from lengthwise.plan.solve.shop.model import ROUNDING, Objective, ShopProblem


def most_batches(problem: ShopProblem, deadline: float | np.ndarray) -> np.ndarray:
    """Batches, not rounded, each as long as each job, with which a machine still ends in time [K, B]; below 1: late."""
    return deadline / problem.alone - problem.later


def capacities(problem: ShopProblem, deadline: float | np.ndarray, max_batches: np.ndarray) -> np.ndarray:
    """Most work of a machine whose largest job is each job [K, B]; not positive where that job alone is late.

    With V batches the longest of which works m, the total is at most V m. Up to V = `max_batches` balance limits:
    V (C / (V + stages - 1) - setup), concave in V. Beyond, in a flow shop, setups are: C - V setup - (stages - 1) m.
    """
    later, setup = problem.later, problem.setup
    if not problem.has_setup and problem.objective is Objective.FLOW_SHOP:
        return deadline - problem.later_work
    floor = np.maximum(np.floor(max_batches + ROUNDING), 1.0)
    if not problem.has_setup:
        cap = floor * (deadline / (floor + later))
    else:
        with np.errstate(divide="ignore", invalid="ignore"):
            peak = np.where(setup > 0, np.floor(np.sqrt(deadline * later / setup) - later), np.inf)
        few = np.clip(peak, 1.0, floor)
        more = np.minimum(few + 1, floor)
        cap = np.maximum(few * (deadline / (few + later) - setup), more * (deadline / (more + later) - setup))
        if problem.objective is Objective.FLOW_SHOP:
            beyond = deadline - (np.ceil(max_batches - ROUNDING) + later) * setup - problem.later_work
            cap = np.fmax(cap, beyond)
    return cap


def shares(problem: ShopProblem, deadline: float | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Shares [K, kinds, B] of a machine that each job takes at least, and where it is in time [K, B]; 0 where not.

    `deadline` may be [K, 1], one per type.
    """
    max_batches = most_batches(problem, deadline)
    open_ = max_batches >= 1 - ROUNDING
    all_open = bool(open_.all())

    def where_open(values: np.ndarray, otherwise: float) -> np.ndarray:
        return values if all_open else np.where(open_, values, otherwise)

    work = where_open(problem.work, 0.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        kinds = [work / where_open(capacities(problem, deadline, max_batches), 1.0)]
        if problem.has_setup:
            kinds.append(where_open((work + problem.forced) / (deadline - problem.later_alone), 0.0))
    if problem.objective is Objective.MAX_TIMES_COUNT:
        batches = np.floor(where_open(max_batches, 1.0) + ROUNDING)
        kinds.append(where_open(problem.taken / (np.maximum(batches, 1.0) * problem.capacity), 0.0))
    if problem.has_whole_setups:
        kinds.append(where_open(np.where(problem.later == 0, whole_batches(problem, deadline), kinds[1]), 0.0))
    return np.stack(kinds, axis=1), open_


def whole_batches(problem: ShopProblem, deadline: float | np.ndarray) -> np.ndarray:
    """Shares [K, B] of a machine of one stage that count whole setups; of no meaning with more stages.

    Let d be the least work per size of any job, so that its work is d size plus an excess, and v batches the most that,
    full of such jobs, leave time for another setup. A machine with V <= v batches holds sizes of at most V capacity and
    work of at most C - V setup; with more, work of at most R = C - (v + 1) setup. In all cases

        sum(d size + f excess) <= R,   if f <= (R - d V capacity) / (C - V setup - d V capacity) for V = 1 .. v,

    whose right side is least at one end. (A flow shop ends no later than MAX_TIMES_COUNT counts.)
    """
    full = problem.density * problem.capacity
    batches = np.maximum(np.floor((deadline - problem.setup) / (full + problem.setup)), 0.0)
    rest = deadline - (batches + 1) * problem.setup
    least: np.ndarray = np.ones_like(full)
    for count in (1.0, batches):
        left = np.maximum(rest - full * count, 0.0)
        more = left + (batches + 1 - count) * problem.setup
        least = np.where((batches > 0) & (more > 0), np.minimum(least, left / np.where(more > 0, more, 1.0)), least)
    linear = problem.density * problem.taken
    with np.errstate(divide="ignore", invalid="ignore"):  # no time is left for any batch
        shares: np.ndarray = np.where(np.isfinite(problem.work), (linear + least * (problem.work - linear)) / rest, 0.0)
    return shares
