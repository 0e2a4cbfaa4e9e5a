"""Runs that read and plan the batches which ranks bring a step ahead, and loops that end early."""

import threading

from lengthwise.core.errors import CheckError, InputError
from tests.session.loops import weights_of
from tests.session.pairs import prepared
from tests.session.rollouts import COLUMNS, batches, grpo_loss, of_rank, rollouts


class NotingPlanner:
    """A planner that notes which thread it plans each step in."""

    def __init__(self, plan):
        self.plan, self.threads = plan, []

    def __call__(self, batch):
        self.threads.append((batch.step, threading.current_thread() is threading.main_thread()))
        return self.plan(batch)


def _run():
    run = prepared(rollouts(12, longest=36), sequences_per_step=8, loss_columns=COLUMNS, step_max_length=48)
    run.planner = NotingPlanner(run.planner)
    own = [of_rank(items, run.world.rank, run.world.size) for items in batches()]
    return run, own


def _compute(run, step, losses):
    for micro_batch in step:
        step.backward(grpo_loss(run, step, micro_batch, "tokens"), mean_over="step")
    losses.append(step.update().loss)


def train_ahead():
    """Losses, which steps the main thread planned, the ledger and weights, of a loop that is left and goes on."""
    run, own = _run()
    source, losses = iter(own), []
    for step in run.steps(source, plan_ahead=True):
        _compute(run, step, losses)
        break  # the next batch has been read
    for step in run.steps(source, plan_ahead=True):
        _compute(run, step, losses)
        run.score(own[0], lambda output, micro_batch: output[0][0][:, 0])
    run.close()
    return losses, run.planner.threads, run.ledger.state_dict(), weights_of(run.model)


def replan_ahead():
    """Losses and which steps the main thread planned, where the planner is another one after the first step."""
    run, own = _run()
    losses, threads = [], run.planner.threads
    for step in run.steps(own, plan_ahead=True):
        _compute(run, step, losses)
        run.planner = NotingPlanner(run.planner.plan)
        run.planner.threads = threads
    run.close()
    return losses, threads


def resume_ahead(folder):
    """Losses of a run that was saved after its first step, and goes on in another one, with the batches from then."""
    run, own = _run()
    losses = []
    for step in run.steps(own, plan_ahead=True):
        _compute(run, step, losses)
        run.save(folder)
        break
    run.close()
    run, own = _run()
    run.resume(folder)
    for step in run.steps(own[run.next_step :], plan_ahead=True):
        _compute(run, step, losses)
    run.close()
    return losses


def fail_ahead():
    """Losses before a batch that cannot be used, and what is said of it."""
    run, own = _run()
    own[1] = [{"input_ids": [1] * 99} | dict.fromkeys(COLUMNS, 0.0)]
    return _losses_until_refused(run, own, plan_ahead=True)


def fail_to_read(plan_ahead):
    """Losses before the last rank's source of batches raises an error, and what is said of it."""
    run, own = _run()

    def source():
        yield own[0]
        if run.world.rank == run.world.size - 1:
            raise ConnectionError("server gone")
        yield from own[1:]

    return _losses_until_refused(run, source(), plan_ahead=plan_ahead)


def score_ahead():
    """Losses before a batch whose source scores it, read ahead, and what is said of it."""
    run, own = _run()

    def source():
        yield own[0]
        run.score(own[1], lambda output, micro_batch: output[0][0][:, 0])
        yield own[1]

    return _losses_until_refused(run, source(), plan_ahead=True)


def _losses_until_refused(run, source, *, plan_ahead):
    losses, said = [], ""
    try:
        for step in run.steps(source, plan_ahead=plan_ahead):
            _compute(run, step, losses)
    except (InputError, CheckError) as error:
        said = str(error)
    run.close()
    return losses, said
