"""Each optimizer step runs at the schedule's rate times its own batch's factor, whatever happens between steps."""

import copy

import pytest
import torch
from torch.optim import SGD, AdamW
from torch.optim import lr_scheduler as schedulers

from lengthwise.core.batch import GlobalBatch
from lengthwise.core.errors import CheckError, InputError
from lengthwise.runtime.train.scaled_lr import ScaledLR

SIZES = [1, 2, 8, 4, 16, 2, 1, 32, 4, 8, 2, 2]
SCHEDULES = {
    "constant": lambda o: schedulers.ConstantLR(o, factor=1.0),
    "lambda": lambda o: schedulers.LambdaLR(o, lambda step: 1 / (1 + step)),
    "step": lambda o: schedulers.StepLR(o, 3, gamma=0.3),
    "exponential": lambda o: schedulers.ExponentialLR(o, 0.8),
    "cosine": lambda o: schedulers.CosineAnnealingLR(o, 12),
    "restarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 4),
    "polynomial": lambda o: schedulers.PolynomialLR(o, 12),
    "cyclic": lambda o: schedulers.CyclicLR(o, 0.01, 0.1, step_size_up=3, cycle_momentum=False),
    "one-cycle": lambda o: schedulers.OneCycleLR(o, 0.1, total_steps=20, cycle_momentum=False),
    "sequential": lambda o: schedulers.SequentialLR(
        o, [schedulers.LinearLR(o, 0.1, total_iters=4), schedulers.CosineAnnealingLR(o, 8)], milestones=[4]
    ),
    "chained": lambda o: schedulers.ChainedScheduler([schedulers.ExponentialLR(o, 0.9), schedulers.StepLR(o, 2, 0.5)]),
    "plateau": lambda o: schedulers.ReduceLROnPlateau(o, factor=0.5, patience=1),
}
pytestmark = pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*")


def new(name):
    """Two groups of one weight each, whose gradient is one: a step lowers a weight by the group's rate."""
    weights = [torch.zeros((), dtype=torch.float64, requires_grad=True) for _ in range(2)]
    groups = [{"params": [weight], "lr": rate} for weight, rate in zip(weights, (0.1, 0.02))]
    optimizer = SGD(groups)
    return weights, optimizer, SCHEDULES[name](optimizer)


def moved(weights, step):
    """The rates that ``step`` used."""
    before = [float(weight.detach()) for weight in weights]
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    step()
    return [old - float(weight.detach()) for old, weight in zip(before, weights)]


def advance(scheduler, name):
    scheduler.step(1.0) if name == "plateau" else scheduler.step()


def base_rates(name):
    _, optimizer, scheduler = new(name)
    rates = []
    for _ in SIZES:
        rates.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        advance(scheduler, name)
    return rates


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_step_runs_at_the_scheduled_rate_times_the_factor_of_its_batch(name):
    weights, optimizer, base = new(name)
    scheduler = ScaledLR(base, rule="sqrt", reference=4)
    assert isinstance(scheduler, schedulers.LRScheduler)
    for size, rates in zip(SIZES, base_rates(name)):
        scheduler.size = size
        used = moved(weights, optimizer.step)
        assert used == pytest.approx([rate * (size / 4) ** 0.5 for rate in rates], rel=1e-12)
        assert scheduler.get_last_lr() == pytest.approx(used, rel=1e-12)
        assert [group["lr"] for group in optimizer.param_groups] == rates  # the schedule never sees the factor
        advance(scheduler, name)


@pytest.mark.parametrize("name", ["cosine", "sequential", "plateau", "one-cycle"])
def test_a_skipped_step_and_a_resume_leave_factors_with_their_batches(name):
    weights, optimizer, base = new(name)
    scheduler, rates = ScaledLR(base, reference=2), base_rates(name)
    num_done = 0
    for number, size in enumerate(SIZES):
        if number == 6:  # saved, and gone on with by another process
            saved = copy.deepcopy((optimizer.state_dict(), scheduler.state_dict()))
            weights, optimizer, base = new(name)
            scheduler = ScaledLR(base, reference=2)
            optimizer.load_state_dict(saved[0])
            scheduler.load_state_dict(saved[1])
        scheduler.size = size
        if number in (2, 7):  # as where a gradient overflows: neither the optimizer nor the schedule steps
            continue
        assert moved(weights, optimizer.step) == pytest.approx([rate * size / 2 for rate in rates[num_done]], rel=1e-12)
        advance(scheduler, name)
        num_done += 1


def test_a_sampler_tells_the_batch_itself():
    class Batches:
        batch = GlobalBatch(step=0, ids=(0, 1, 2), lengths=(5, 5, 10))

    weights, optimizer, base = new("constant")
    scheduler = ScaledLR(base, reference=10, by="tokens", sampler=Batches())
    assert moved(weights, optimizer.step) == pytest.approx([0.2, 0.04])
    assert moved(weights, optimizer.step) == pytest.approx([0.2, 0.04])  # another of the same batch is no mistake
    with pytest.raises(InputError, match="the sampler tells"):
        scheduler.size = 3


def test_a_size_counts_for_one_step_and_a_failed_step_leaves_the_rates_alone():
    weights, optimizer, base = new("constant")
    scheduler = ScaledLR(base, reference=2)
    with pytest.raises(CheckError, match=r"set scheduler\.size before each"):
        optimizer.step()
    scheduler.size = 4

    def fail():
        raise RuntimeError("no memory")

    with pytest.raises(RuntimeError, match="no memory"):
        optimizer.step(fail)
    assert moved(weights, optimizer.step) == pytest.approx([0.2, 0.04])  # twice the rate, not four times
    with pytest.raises(CheckError, match="not known"):
        optimizer.step()
    with pytest.raises(InputError, match="a batch has size 0"):
        scheduler.size = 0


def test_rates_that_are_tensors_keep_their_identity_and_a_closed_wrapper_scales_nothing():
    weight = torch.zeros((), requires_grad=True)
    optimizer = AdamW([weight], lr=torch.tensor(0.5), capturable=False, foreach=False, weight_decay=0.0)
    rate = optimizer.param_groups[0]["lr"]
    scheduler = ScaledLR(schedulers.ConstantLR(optimizer, factor=1.0), reference=1)
    scheduler.size = 3
    assert moved([weight], optimizer.step) == pytest.approx([1.5], rel=1e-5)  # Adam's first step is its rate
    assert optimizer.param_groups[0]["lr"] is rate and float(rate) == 0.5
    scheduler.close()
    used = moved([weight], optimizer.step)
    assert used == pytest.approx([0.5], rel=1e-5)
