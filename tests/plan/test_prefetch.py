"""Plans made ahead are the plans made on the spot, and nothing that goes wrong in planning stops training."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from lengthwise.core.errors import InfeasibleError
from lengthwise.core.lengths import LengthIndex
from lengthwise.data.sampler import Sampler
from lengthwise.plan.planner import Planner
from lengthwise.plan.prefetch import PlanAhead
from tests.plan.costs import make_problem

CORPUS = LengthIndex(lengths=np.arange(1, 91))
PROBLEM = make_problem(num_devices=2, degrees=[1], stages=[1])
STATIC = Planner(policy="static", problem=PROBLEM)


def sampler():
    return Sampler(CORPUS, seed=3, tokens_per_step=200)


class Failing:
    """A planner that fails at one step."""

    def __init__(self, step, error):
        self.step, self.error = step, error

    def __call__(self, batch):
        if batch.step == self.step:
            raise self.error
        return STATIC(batch)


class Dying:
    """A planner whose worker process dies at one step."""

    def __init__(self, step):
        self.step, self.home = step, os.getpid()

    def __call__(self, batch):
        if batch.step == self.step and os.getpid() != self.home:
            os._exit(9)
        return STATIC(batch)


class Stuck(Dying):
    """A planner whose worker process never answers at one step."""

    def __call__(self, batch):
        if batch.step == self.step and os.getpid() != self.home:
            os.kill(os.getpid(), signal.SIGSTOP)
        return STATIC(batch)


def digests(ahead, steps):
    return [ahead(next(ahead)).digest for _ in range(steps)]


@pytest.mark.first_cells(1)
@pytest.mark.parametrize("workers", [0, 1, 2])
def test_plans_do_not_depend_on_the_number_of_workers(workers):
    ahead = PlanAhead(sampler(), STATIC, fallback=STATIC, workers=workers, depth=3)
    try:
        stream = sampler()
        assert digests(ahead, 8) == [STATIC(next(stream)).digest for _ in range(8)]
    finally:
        ahead.close()


@pytest.mark.parametrize("workers", [0, 1])
def test_another_planner_plans_the_batch_at_hand_and_all_that_follow(workers):
    other = Planner(policy="padded", problem=PROBLEM)
    ahead = PlanAhead(sampler(), STATIC, fallback=STATIC, workers=workers, depth=3)
    try:
        digests(ahead, 1)
        batch = next(ahead)
        assert ahead(batch).policy == "static"
        ahead.plan_with(other, fallback=other)
        assert ahead(batch) == other(batch)
        assert [ahead(next(ahead)).policy for _ in range(6)] == ["padded"] * 6
        plain = sampler()
        for _ in range(8):
            next(plain)
        assert ahead.state_dict() == plain.state_dict()
    finally:
        ahead.close()


@pytest.mark.parametrize("workers", [0, 1])
def test_the_state_is_that_of_the_batch_handed_out_not_of_those_drawn_ahead(workers):
    ahead = PlanAhead(sampler(), STATIC, fallback=STATIC, workers=workers, depth=3)
    try:
        digests(ahead, 4)
        state = ahead.state_dict()
        following = digests(ahead, 3)
        ahead.load_state_dict(state)
        assert digests(ahead, 3) == following
        plain = sampler()
        plain.load_state_dict(state)
        assert next(plain).step == 4
    finally:
        ahead.close()


@pytest.mark.parametrize("workers", [0, 1])
def test_a_step_whose_planning_fails_is_planned_by_the_fallback_with_a_warning(workers, capsys):
    ahead = PlanAhead(sampler(), Failing(2, RuntimeError("no plan today")), fallback=STATIC, workers=workers, depth=3)
    try:
        stream = sampler()
        assert digests(ahead, 5) == [STATIC(next(stream)).digest for _ in range(5)]
    finally:
        ahead.close()
    assert "planning step 2 failed (RuntimeError: no plan today)" in capsys.readouterr().err


def test_a_sequence_that_fits_nowhere_still_stops_the_run():
    ahead = PlanAhead(sampler(), Failing(1, InfeasibleError("too long")), fallback=STATIC, workers=1)
    try:
        with pytest.raises(InfeasibleError, match="too long"):
            digests(ahead, 3)
    finally:
        ahead.close()


def test_where_a_worker_dies_this_process_makes_the_same_plans():
    ahead = PlanAhead(sampler(), Dying(2), fallback=Failing(2, AssertionError("not needed")), workers=1, depth=2)
    try:
        stream = sampler()
        assert digests(ahead, 6) == [STATIC(next(stream)).digest for _ in range(6)]
    finally:
        ahead.close()


def test_where_a_worker_hangs_this_process_makes_the_same_plans_and_ends(capsys):
    failing = Failing(2, AssertionError("not needed"))
    ahead = PlanAhead(sampler(), Stuck(2), fallback=failing, workers=1, depth=2, patience_s=3.0)
    try:
        stream = sampler()
        assert digests(ahead, 6) == [STATIC(next(stream)).digest for _ in range(6)]
    finally:
        ahead.close()
    assert "a planning process was silent for 3 s; plans are made here" in capsys.readouterr().err


def test_planning_processes_end_with_the_process_they_plan_for(tmp_path):
    code = f"""
import os, sys
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from tests.plan.test_prefetch import STATIC, digests, sampler
from lengthwise.plan.prefetch import PlanAhead
if __name__ == "__main__":
    ahead = PlanAhead(sampler(), STATIC, fallback=STATIC, workers=1, depth=2)
    digests(ahead, 1)
    sys.stdout.write(" ".join(map(str, ahead._pool._processes)))
    sys.stdout.flush()
    os.kill(os.getpid(), 9)
"""
    script = tmp_path / "plans.py"
    script.write_text(code)
    done = subprocess.run([sys.executable, str(script)], stdout=subprocess.PIPE, text=True, timeout=100)
    workers = [int(word) for word in done.stdout.split()]
    assert len(workers) == 1
    end = time.monotonic() + 60
    while any(_is_alive(worker) for worker in workers) and time.monotonic() < end:
        time.sleep(0.05)
    assert not any(_is_alive(worker) for worker in workers)


def _is_alive(process):
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
