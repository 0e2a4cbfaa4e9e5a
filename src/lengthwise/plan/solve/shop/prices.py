"""The prices of machine time that prove the highest bound: a small linear program, solved by an interior point method.

Jobs of class i are split over types, x_ki >= 0 with sum_k x_ki = count_i, so that no kind of share loads a type by more
than t times its machines:  sum_i s_kri x_ki + u_kr = t d_k.  The least t is the value of the dual

    max sum_i count_i min_k sum_r p_kr s_kri    over prices p >= 0 with sum_kr d_k p_kr = 1,

and a deadline whose value is above 1 cannot be met. Newton steps on the central path (Mehrotra 1992, without corrector)
need one system of K x kinds + 1 equations each, whatever the number of jobs. The deadline moves to where the value is 1
along the way. Whatever prices come out are valid: `bound` proves with them, to rounding, over every job.

K types, r kinds of share, n classes.
"""

import numpy as np

from lengthwise.plan.solve.shop.model import ShopProblem
from lengthwise.plan.solve.shop.shares import shares

STEPS = 14
DEADLINE_STEPS = (1, 3, 5)
"""Steps before which the deadline moves to where the value is about 1."""
CENTERING = 0.1
"""Factor by which each step shrinks the distance to the optimum, if it may go all the way."""
BACKOFF = 0.97
"""Part of the way to the nearest constraint that a step goes."""
TOLERANCE = 5e-4
"""Gap between the primal and dual value that is small enough."""


def search_prices(classes: ShopProblem, floor: float, start: float) -> tuple[float, np.ndarray]:
    """A deadline near the largest one that prices refute, at least `floor`, and prices [K, kinds] for it."""
    path = _CentralPath(classes, floor, max(start, floor))
    for step in range(STEPS):
        if step in DEADLINE_STEPS:
            path.move_deadline(max(floor, path.deadline * path.value(middle=step == DEADLINE_STEPS[0])))
        path.step()
        if path.deadline <= floor and path.stretch <= 1:
            return floor, path.prices
        if step >= DEADLINE_STEPS[-1] and path.gap() < TOLERANCE:
            break
    return max(floor, path.deadline * path.value()), path.prices


class _CentralPath:
    """An interior point of the linear program and its dual, at one deadline."""

    def __init__(self, classes: ShopProblem, floor: float, deadline: float) -> None:
        self.classes = classes
        self.machines = classes.count[:, None]
        self.deadline = max(deadline, floor)
        self._find_shares()
        num_kinds = self.taken.shape[1]
        self.prices = np.full((len(self.machines), num_kinds), 1 / (num_kinds * classes.count.sum()))
        self.flow = self.open * self.machines
        self.flow *= classes.counts / self.flow.sum(axis=0)
        self._relax(slack=1.2)
        self.worth = 0.7 * self._cheapest()
        self.surplus = self._where_open(self.cost - self.worth, 1.0)

    def _find_shares(self) -> None:
        """The shares at the deadline, which is moved until each job is in time somewhere, and where each job is."""
        taken, open_ = shares(self.classes, self.deadline)
        while not open_.any(axis=0).all():
            self.deadline *= 1.001
            taken, open_ = shares(self.classes, self.deadline)
        self.taken, self.open, self.num_open = taken, open_, int(np.count_nonzero(open_))
        self.all_open = self.num_open == open_.size

    def _where_open(self, values: np.ndarray, otherwise: float) -> np.ndarray:
        """The values of types on which jobs are in time, of the others another one."""
        return values if self.all_open else np.where(self.open, values, otherwise)

    def _relax(self, *, slack: float) -> None:
        """Load and unused time of each type and kind, and the stretch of the deadline that makes the flow feasible."""
        self.load = (self.taken @ self.flow[:, :, None])[:, :, 0]
        self.stretch = float((self.load / self.machines).max()) * slack
        self.unused = self.stretch * self.machines - self.load

    def _cheapest(self) -> np.ndarray:
        self.cost = (self.prices[:, None, :] @ self.taken)[:, 0, :]
        self.cheapest: np.ndarray = self._where_open(self.cost, np.inf).min(axis=0)
        return self.cheapest

    def value(self, *, middle: bool = False) -> float:
        """The value of the dual, a lower bound of the optimum, or of the middle of primal and dual, an estimate."""
        dual = float(self.cheapest @ self.classes.counts)
        return float(np.sqrt(dual * (self.load / self.machines).max())) if middle else dual

    def gap(self) -> float:
        """Difference of the primal and dual value."""
        return float((self.load / self.machines).max()) - self.value()

    def move_deadline(self, deadline: float) -> None:
        """Go to another deadline with the same point, pushed inside where it would be infeasible."""
        self.deadline = deadline
        self._find_shares()
        self.flow = self._where_open(np.maximum(self.flow, 1e-9), 0.0)
        self.flow *= self.classes.counts / self.flow.sum(axis=0)
        self._relax(slack=1.05)
        self.worth = np.minimum(self.worth, 0.95 * self._cheapest())
        self.surplus = self._where_open(self.cost - self.worth, 1.0)

    def step(self) -> None:
        """One Newton step towards a point `CENTERING` times as far from the optimum."""
        num_types, num_kinds, _ = self.taken.shape
        size = num_types * num_kinds
        distance = float((self.flow * self.surplus).sum()) + float((self.unused * self.prices).sum())
        aim = CENTERING * distance / (self.num_open + size)
        theta = self.flow / self.surplus
        rho = self._where_open(aim / self.surplus, 0.0) - self.flow
        total, owed = theta.sum(axis=0), rho.sum(axis=0)
        weighted = self.taken * theta[:, None, :]
        flat = weighted.reshape(size, -1)
        system = np.zeros((size + 1, size + 1))
        system[:size, :size] = -(flat / total) @ flat.T
        for kind, block in enumerate(weighted @ self.taken.transpose(0, 2, 1)):
            block_slice = slice(kind * num_kinds, (kind + 1) * num_kinds)
            system[block_slice, block_slice] += block
        drift = aim / self.prices - self.unused
        system.reshape(-1)[: size * (size + 2) : size + 2] += (self.unused / self.prices).ravel()  # the diagonal
        system[:size, size] = system[size, :size] = np.repeat(self.machines, num_kinds)
        right = (self.taken @ rho[:, :, None])[:, :, 0] + drift
        solved = np.linalg.solve(system, np.append(right.ravel() - flat @ (owed / total), 0.0))
        d_prices = solved[:size].reshape(num_types, num_kinds)
        d_cost = (d_prices[:, None, :] @ self.taken)[:, 0, :]
        d_worth = ((theta * d_cost).sum(axis=0) - owed) / total
        d_surplus = self._where_open(d_cost - d_worth, 0.0)
        d_flow = rho - theta * d_surplus
        d_unused = drift - self.unused / self.prices * d_prices
        primal = _length(d_flow, self._where_open(self.flow, 1.0), d_unused, self.unused)
        dual = _length(d_surplus, self.surplus, d_prices, self.prices)
        self.flow = self.flow + primal * d_flow
        self.unused = self.unused + primal * d_unused
        self.stretch += primal * float(solved[size])
        self.load = self.stretch * self.machines - self.unused
        self.prices = self.prices + dual * d_prices
        self.worth = self.worth + dual * d_worth
        self.surplus = self.surplus + dual * d_surplus
        self._cheapest()


def _length(change: np.ndarray, values: np.ndarray, more_change: np.ndarray, more_values: np.ndarray) -> float:
    """How far along the changes, at most 1, all values stay positive, with a margin."""
    steepest = max(float((-change / values).max()), float((-more_change / more_values).max()))
    return min(1.0, BACKOFF / steepest) if steepest > 0 else 1.0
