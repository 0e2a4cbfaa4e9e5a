"""Ranks that would compute different things are refused by name before they compute, or at the step where they do."""

import random
import time
from datetime import timedelta
from functools import partial

import numpy as np
import pytest
import torch

import lengthwise as lw
from lengthwise.core.errors import CheckError, CommunicationError, InputError
from lengthwise.core.lengths import LengthIndex
from tests.session import models
from tests.session.loops import as_started_by_torchrun, step_through

pytestmark = pytest.mark.usefixtures("unchecked")

OPTIONS = {"steps": 2, "tokens_per_step": 200, "lr": 1e-2, "seed": 3, "memory_gib": 40, "policy": "dcp-intra"}


def prepare(model, corpus, **options):
    return lw.prepare(model, corpus, cost=models.mixed_cost(), **OPTIONS | options)


def other_tokens():
    rows = models.rows()
    rows[7] = (rows[7] + 1) % models.VOCAB
    return rows


def other_labels(rank):
    rows = models.rows()
    labels = [row.copy() for row in rows]
    if rank:
        labels[5][1] = -100
    return [{"input_ids": row.tolist(), "labels": label.tolist()} for row, label in zip(rows, labels)]


def with_buffer(value):
    model = models.gpt()
    model.register_buffer("scale", torch.full((3,), float(value)))
    return model


DIFFERENT = {
    "weights": (lambda rank: (models.gpt(seed=rank), models.rows(), {}), "seed.* Others on rank 1: blocks.0.* and"),
    "a buffer": (lambda rank: (with_buffer(rank), models.rows(), {}), "Others on rank 1: scale"),
    "what is trained": (
        lambda rank: (models.gpt().requires_grad_(True), models.rows(), {})
        if rank
        else (_frozen_head(), models.rows(), {}),
        "model.parameters.head.weight is .frozen.* on rank 0, .trained.* on rank 1",
    ),
    "the mode": (lambda rank: (models.gpt().train(rank == 0), models.rows(), {}), "model.training is true on rank 0"),
    "lr": (lambda rank: (models.gpt(), models.rows(), {"lr": 0.1 + rank}), "options.lr is 0.1 on rank 0, 1.1 on"),
    "seed": (lambda rank: (models.gpt(), models.rows(), {"seed": rank}), "options.seed is 0 on rank 0, 1 on rank 1"),
    "clip_norm": (lambda rank: (models.gpt(), models.rows(), {"clip_norm": 1.0 + rank}), "options.clip_norm is"),
    "optimizer": (
        lambda rank: (models.gpt(), models.rows(), {"weight_decay": 0.1 * rank}), "options.weight_decay is"
    ),
    "steps": (lambda rank: (models.gpt(), models.rows(), {"steps": 2 + rank}), "options.steps is"),
    "policy": (lambda rank: (models.gpt(), models.rows(), {"policy": ("auto", "static")[rank]}), "options.policy is"),
    "a tensor": (lambda rank: (models.gpt(), models.rows(), {"loss": partial(max, bfloat16(rank))}), "options.loss is"),
    "tokens": (lambda rank: (models.gpt(), other_tokens() if rank else models.rows(), {}), "corpus.content is"),
    "labels": (lambda rank: (models.gpt(), other_labels(rank), {}), "corpus.content is"),
    "lengths": (lambda rank: (models.gpt(), models.rows(seed=rank), {}), "corpus.lengths is"),
    "number": (lambda rank: (models.gpt(), models.rows(40 - rank), {}), "corpus.num_sequences is 40 on rank 0, 39"),
    "an empty item": (lambda rank: (models.gpt(), models.rows() + [[]] * rank, {}), "item 40"),
}  # fmt: skip


def bfloat16(number):
    return torch.full((2,), number, dtype=torch.bfloat16, requires_grad=True)


def _frozen_head():
    model = models.gpt()
    model.head.weight.requires_grad_(False)
    return model


def test_ranks_that_were_given_different_things_are_refused_with_what_differs(ranks):
    ranks(2).run(check_different)


def check_different():
    as_started_by_torchrun()
    rank = torch.distributed.get_rank()
    for name, (make, message) in DIFFERENT.items():
        model, corpus, options = make(rank)
        with pytest.raises(InputError, match=message):
            prepare(model, corpus, **options)
        assert "forward" not in vars(model), name


class Restless:
    """An index whose rows are others whenever they are read, on one rank."""

    def __init__(self, rank):
        self.rows, self.rank, self.is_restless = models.rows(), rank, False
        self.lengths = LengthIndex(lengths=np.array([len(row) for row in self.rows]))

    def tokens(self, number):
        row = self.rows[number]
        return (row + 1) % models.VOCAB if self.is_restless and self.rank else row


def test_sequences_that_change_are_refused_where_ranks_share_them(ranks):
    ranks(2).run(check_restless)


def check_restless():
    as_started_by_torchrun()
    items = Restless(torch.distributed.get_rank())
    run = prepare(models.gpt(), items, policy="static", recompute="none")
    items.is_restless = True
    with pytest.raises(CheckError, match="step 0: ranks 0-1 share sequences, but read other tokens or labels"):
        step_through(run)
    run.close()


def test_a_rate_that_is_another_function_on_every_rank_is_refused_at_its_step(ranks):
    ranks(2).run(check_rates)


def check_rates():
    as_started_by_torchrun()
    rank = torch.distributed.get_rank()
    run = prepare(models.gpt(), models.rows(), lr=lambda step: 0.01 + rank * step)
    with pytest.raises(CheckError, match=r"step 1: lr is 0\.01, 1\.01 on ranks 0 to 1"):
        step_through(run)
    run.close()


def test_a_rate_that_cannot_be_used_is_refused_on_every_rank(ranks):
    ranks(2).run(check_bad_rates)


def check_bad_rates():
    as_started_by_torchrun()
    rank = torch.distributed.get_rank()
    bad = {
        "failed with ZeroDivisionError": lambda step: 0.1 / (1 - step * rank),
        "failed with TypeError": lambda step: None if rank else 0.1,
        r"is -0\.1; give one number from 0": lambda step: -0.1,
        "is nan; give one number from 0": lambda step: float("nan") if rank else 0.1,
    }
    for said, lr in bad.items():
        run = prepare(models.gpt(), models.rows(), lr=lr, steps=2)
        with pytest.raises(CheckError, match=rf"lr of step [01] {said}"):
            step_through(run)
        run.close()


def test_inputs_that_fail_on_one_rank_are_refused_on_every_rank(ranks):
    ranks(2).run(check_inputs_of_one_rank)


def check_inputs_of_one_rank():
    as_started_by_torchrun()

    def inputs(micro_batch):
        if torch.distributed.get_rank():
            raise KeyError("film")
        return {"idx": micro_batch.tokens[None], "targets": micro_batch.targets[None]}

    with pytest.raises(InputError, match="KeyError: 'film'"):
        prepare(models.gpt(), models.rows(), inputs=inputs)


def test_preparing_leaves_buffers_and_random_numbers_as_they_were(tmp_path):
    class Counting(models.GPT):
        def forward(self, idx, targets=None):
            self.calls += 1
            random.random(), np.random.rand(), torch.rand([])
            return super().forward(idx, targets)

    def numbers():
        return random.random(), np.random.rand(), torch.rand(3).tolist()

    model = Counting().double()
    model.register_buffer("calls", torch.zeros(2, dtype=torch.int64))
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(5)
    expected = numbers()
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(5)
    run = lw.prepare(
        model, models.rows(), steps=1, tokens_per_step=200, profile=tmp_path / "profile.json", device="cpu",
        check=False, verbose=False,
    )  # fmt: skip
    assert model.calls.tolist() == [0, 0]
    assert numbers() == expected
    run.close()


def test_buffers_come_back_with_a_checkpoint(tmp_path):
    run = prepare(with_buffer(2), models.rows())
    step_through(run)
    run.save(tmp_path)
    run.close()
    model = with_buffer(9)
    run = prepare(model, models.rows())
    run.resume(tmp_path)
    assert model.scale.tolist() == [2.0] * 3
    run.close()
    model = models.gpt()
    model.register_buffer("scale", torch.zeros(4))
    run = prepare(model, models.rows())
    with pytest.raises(InputError, match=r"buffer scale as torch.float32 \[3\], the model as torch.float32 \[4\]"):
        run.resume(tmp_path)
    run.close()


def test_a_rank_that_does_not_come_is_named_within_the_limit(fresh_ranks):
    ranks = fresh_ranks(2)
    assert ranks.run(wait_for_a_rank_that_loops)[0]


def wait_for_a_rank_that_loops():
    """The second rank computes something else for longer than the limit."""
    as_started_by_torchrun()
    run = prepare(models.gpt(), models.rows(), timeout_s=1.0, policy="static")
    backend = torch.distributed.group.WORLD._get_backend(torch.device("cpu"))
    backend._set_default_timeout(timedelta(seconds=1))  # torch does not know the pool's kind of group to be Gloo's
    step = next(run.steps())
    for micro_batch in step:
        step.backward(run.model(**micro_batch.inputs)[1])
    if run.world.rank == 1:
        time.sleep(4)
        return True
    with pytest.raises(
        CommunicationError,
        match=r"step 0, step.update\(\).* was not over within 1 s: rank 1 did not come, it is at",
    ):
        step.update()
    return True
