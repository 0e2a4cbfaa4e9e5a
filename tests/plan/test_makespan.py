from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from lengthwise.plan.solve.makespan import longest_first


def makespan(times, jobs):
    return max(sum(times[job] for job in held) for held in jobs)


@given(st.lists(st.floats(0.01, 100), max_size=60), st.integers(1, 12))
def test_every_job_runs_once(times, num_machines):
    jobs = longest_first(times, num_machines)
    assert len(jobs) == num_machines
    assert sorted(job for held in jobs for job in held) == list(range(len(times)))


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=6), st.integers(1, 3))
def test_the_last_machine_ends_at_most_a_third_late(times, num_machines):
    owners = product(range(num_machines), repeat=len(times))
    optimum = min(max(sum(t for t, o in zip(times, own) if o == m) for m in range(num_machines)) for own in owners)
    limit = 4 / 3 - 1 / (3 * num_machines)  # Graham 1969
    assert makespan(times, longest_first(times, num_machines)) <= optimum * limit * (1 + 1e-9)


def test_the_known_worst_case_of_two_machines():
    assert makespan([3, 3, 2, 2, 2], longest_first([3, 3, 2, 2, 2], 2)) == 7  # the optimum is 6
