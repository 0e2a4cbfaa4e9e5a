"""A batch sampler and a schedule of torch: rates follow global batches, on any number of ranks, after a resume too."""

import json

import pytest
import torch
from torch.optim import SGD
from torch.optim.lr_scheduler import CosineAnnealingLR

import lengthwise as lw

LENGTHS = [3, 9, 4, 30, 5, 6, 12, 7, 3, 21]
BUDGET = {"tokens_per_micro_batch": 32, "tokens_per_step": 40}


def rates(num_ranks, rank, stop=None):
    """The rate of every step of an epoch, by step; saved and gone on with by other objects after ``stop`` steps."""

    def new():
        weight = torch.zeros((), dtype=torch.float64, requires_grad=True)
        optimizer = SGD([weight], lr=1.0)
        sampler = lw.BatchSampler(LENGTHS, rank=rank, num_ranks=num_ranks, **BUDGET)
        base = CosineAnnealingLR(optimizer, 10)
        return weight, optimizer, sampler, lw.ScaledLR(base, reference=2, by="sequences", sampler=sampler)

    weight, optimizer, sampler, scheduler = new()
    found, states = {}, None

    def go():
        for _ in sampler:
            if sampler.is_last:
                before, weight.grad = float(weight.detach()), torch.ones_like(weight)
                optimizer.step()
                scheduler.step()
                found[sampler.step] = before - float(weight.detach())
                if len(found) == stop:
                    return

    go()
    if stop is not None:
        states = json.loads(json.dumps((sampler.state_dict(), scheduler.state_dict()))), optimizer.state_dict()
        weight, optimizer, sampler, scheduler = new()
        sampler.load_state_dict(states[0][0])
        optimizer.load_state_dict(states[1])
        scheduler.load_state_dict(states[0][1])
        stop = None
        go()
    return found


def test_rates_are_the_same_on_any_number_of_ranks_and_after_a_resume():
    sampler = lw.BatchSampler(LENGTHS, rank=0, num_ranks=1, **BUDGET)
    sizes: dict[int, int] = {}
    for _ in sampler:
        sizes[sampler.step] = len(sampler.batch.ids)
    alone = rates(1, 0)
    assert len(set(sizes.values())) > 1 and list(alone) == list(sizes)
    schedule = CosineAnnealingLR(SGD([torch.zeros(())], lr=1.0), 10)
    for step, size in sizes.items():
        assert alone[step] == pytest.approx(schedule.get_last_lr()[0] * size / 2, rel=1e-12)
        schedule.optimizer.step()
        schedule.step()
    for others in (rates(2, 0), rates(3, 2), rates(2, 1, stop=2)):
        assert others == pytest.approx(alone, rel=1e-12)
