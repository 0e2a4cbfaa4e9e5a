"""Runs whose loss couples sequences of different micro-batches and ranks, and what can go wrong in their loops."""

from functools import partial

import numpy as np
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from lengthwise.core.errors import LengthwiseError
from lengthwise.runtime.comm.world import start_world
from tests.runtime.loop import memory_runs
from tests.runtime.loop.memory_runs import FailInBackward, fail_here
from tests.runtime.loop.runs import Packs, plan_of
from tests.session import models
from tests.session.branches import COLUMNS, groups
from tests.session.branches import token_logps as branch_logps
from tests.session.loops import as_started_by_torchrun, weights_of
from tests.session.pairs import (
    LR,
    STEPS,
    UNITS_A_STEP,
    log_probabilities,
    log_probability,
    pairs,
    preference,
    prepared,
    reference,
)


def all_micro_batches(plan):
    """The numbers of all micro-batches of a plan, by pipeline and number in it."""
    return [
        (number, index)
        for number, pipeline in enumerate(plan.pipelines)
        for index in range(len(pipeline.micro_batches))
    ]


KEPT = {
    "all": lambda plan: frozenset(all_micro_batches(plan)),
    "none": lambda plan: frozenset(),
    "some": lambda plan: frozenset(key for key in all_micro_batches(plan) if sum(key) % 2),
}
"""Which forwards keep what their backward needs."""


def mean_preference(gains):
    return preference(gains).mean()


def train_coupled_dpo(settings):
    """Losses, whether members of a pair were on different ranks, and weights of steps over the corpus of pairs."""
    results = []
    for options in settings:
        frozen, keep = reference(), options.get("keep", "all")
        options = {name: value for name, value in options.items() if name != "keep"}
        run = prepared(
            pairs(), frozen=[frozen], coupled_loss=mean_preference,
            **{"sequences_per_step": UNITS_A_STEP, "steps": STEPS} | options,
        )  # fmt: skip
        run.coupling.keep_forwards, losses, is_apart = KEPT[keep], [], False
        for step in run.steps():
            for micro_batch in step:
                with torch.no_grad():
                    expected = log_probabilities(frozen, micro_batch)
                step.couple(log_probabilities(run.model, micro_batch) - expected)
            losses.append(step.update().loss)
            ranks_of = {i: p.ranks for p in step.plan.pipelines for m in p.micro_batches for i in m.pack.ids}
            is_apart = is_apart or any(ranks_of[i] != ranks_of[i + 1] for i in ranks_of if i % 2 == 0)
        run.close()
        results.append((losses, is_apart, weights_of(run.model)))
    return results


class Tempered(models.GPT):
    """Has a temperature that no forward reads."""

    def __init__(self):
        super().__init__()
        self.sharpness = nn.Parameter(torch.tensor(-1.2))


def tempered():
    torch.manual_seed(0)
    return Tempered().double()


def tempered_loss(model, gains):
    """A loss that reads the temperature, and weights that forwards read as well."""
    chosen, rejected = gains.unbind(1)
    return 0.01 * model.norm.weight.square().sum() - F.logsigmoid(model.sharpness.exp() * (chosen - rejected)).mean()


def train_tempered(settings):
    """Losses and weights of three steps over twelve pairs, four each."""
    results = []
    for options in settings:
        model, keep, losses = tempered(), KEPT[options["keep"]], []
        options = {name: value for name, value in options.items() if name != "keep"}
        run = prepared(
            pairs(), model=model, coupled_loss=partial(tempered_loss, model), sequences_per_step=4,
            order="corpus", steps=3, **options,
        )  # fmt: skip
        run.coupling.keep_forwards = keep
        for step in run.steps():
            for micro_batch in step:
                step.couple(log_probabilities(model, micro_batch))
            losses.append(step.update().loss)
        run.close()
        results.append((losses, weights_of(model)))
    return results


def train_tempered_alone():
    """What a plain loop makes of it."""
    model, losses = tempered(), []
    for first in range(0, 12, 4):
        units = pairs()[first : first + 4]
        gains = torch.stack([torch.stack([log_probability(model, member) for member in unit]) for unit in units])
        loss = tempered_loss(model, gains)
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= LR * parameter.grad
                parameter.grad = None
        losses.append(float(loss.detach()))
    return losses, weights_of(model)


def refused_reads():
    """What is said of losses that read what gets no gradient."""
    model, outside = tempered(), torch.tensor(0.5, requires_grad=True)
    losses = {
        "whole": lambda gains: outside * tempered_loss(model, gains),
        "by-layer": partial(tempered_loss, model),
    }
    said = []
    for weights, loss_of in losses.items():
        run = prepared(pairs(), model=model, coupled_loss=loss_of, sequences_per_step=4, steps=1, weights=weights)
        try:
            for step in run.steps():
                for micro_batch in step:
                    step.couple(log_probabilities(model, micro_batch))
        except LengthwiseError as error:
            said.append(str(error))
        run.close()
    return said


def train_dpo_with_fsdp2():
    """Losses, numbers of forwards that were kept, and weights of steps of a model whose weights FSDP2 shards."""
    torch.manual_seed(0)
    as_started_by_torchrun()
    world, frozen, model = start_world("cpu"), reference(), models.gpt()
    mesh = init_device_mesh("cpu", (world.size,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=False)
    options = {"sequences_per_step": UNITS_A_STEP, "steps": STEPS, "frozen": [frozen], "policy": "packed"}
    run = prepared(pairs(), model=fully_shard(model, mesh=mesh), coupled_loss=mean_preference, **options)
    losses, kept = [], []
    for step in run.steps():
        for micro_batch in step:
            with torch.no_grad():
                expected = log_probabilities(frozen, micro_batch)
            step.couple(log_probabilities(model, micro_batch) - expected)
        kept.append(step.num_kept)
        losses.append(step.update().loss)
    run.close()
    return losses, kept, {name: value.detach().full_tensor().numpy() for name, value in model.named_parameters()}


def score_pairs():
    """Log-probabilities by member of the pairs that this rank brings to a run with a coupled loss, and the pairs."""
    run = prepared(pairs(), coupled_loss=mean_preference, sequences_per_step=UNITS_A_STEP, step_max_length=60)
    own = pairs(11, seed=5)[run.world.rank :: run.world.size]
    scores = run.score(own, lambda output, mb: mb.per_sequence(_logps(output, mb)), per="sequence")
    run.close()
    return scores, own


def _logps(output, micro_batch):
    return -F.cross_entropy(output[0][0], micro_batch.labels, reduction="none", ignore_index=-100)


def train_on_branches(share):
    """Loss and weights of a step over groups whose sequences share what they begin with, coupled over all of them."""
    options = {"share_prefixes": share, "loss_columns": COLUMNS, "sequences_per_step": 8, "steps": 1}
    run = prepared(groups(), coupled_loss=spread, **options)
    for step in run.steps():
        for micro_batch in step:
            logits = run.model(**micro_batch.inputs)[0][0]
            step.couple(micro_batch.per_sequence(branch_logps(logits, micro_batch.labels)))
        loss = step.update().loss
    run.close()
    return loss, weights_of(run.model)


def spread(values):
    """A loss of all sequences of the step that no sum over units makes."""
    return values.logsumexp((0, 1)) + (values[:, 0] - values.mean()).square().mean() / 50


class Fragile(nn.Module):
    """The feed-forward of a block with dropout, which runs out of memory where it is told to."""

    def __init__(self, mlp, dropout):
        super().__init__()
        self.mlp, self.dropout = mlp, nn.Dropout(dropout)

    def forward(self, x):
        fail_here("forward")
        return FailInBackward.apply(self.dropout(self.mlp(x)), "backward")


def fragile_run(dropout=0.0, **options):
    model = models.gpt()
    for block in model.blocks:
        block.mlp = Fragile(block.mlp, dropout)
    run = prepared(
        pairs(), model=model.train(), coupled_loss=mean_preference, sequences_per_step=6, step_max_length=60, **options
    )  # fmt: skip
    number = run.wrapped_model.structure.num_layers
    apart = Packs(ranks=(0,), packs=((1, 4),), phase=1), Packs(ranks=(1,), packs=((2,), (5,)), phase=1)
    if run.world.size == 1:
        apart = (Packs(ranks=(0,), packs=((1, 4), (2,), (5,)), phase=1),)
    shared = Packs(ranks=tuple(range(run.world.size)), packs=((0, 3),), recompute=(True, False, True))
    run.planner = lambda batch: plan_of(batch, (shared, *apart), number)
    return run


def steps_with_dropout(keeps):
    """The gradient of the same step with dropout, by which forwards keep their graph."""
    run, gradients = fragile_run(dropout=0.4), []
    run.lr = lambda step: 0.0
    run.on_finish = lambda step: gradients.append(run.state.pushed.clone())
    for keep in keeps:
        run.next_step, run.coupling.keep_forwards = 0, KEPT[keep]
        step = run.step(pairs(12, seed=4)[6:9][run.world.rank :: run.world.size])
        for micro_batch in step:
            first, second = (log_probabilities(run.model, micro_batch) for _ in range(2))
            assert (first != second).any(), "each call has dropout of its own"
            step.couple(first + 0.5 * second)
        step.update()
    run.close()
    return gradients


class _LoopError(Exception):
    """Raised by a loop of a user."""


def _trouble(name, step, run, micro_batch, values, number):
    """Do on this rank what a loop or a device may do wrong; the values to hand over, or None to hand over none."""
    is_second = step._coupled is not None
    if name == "an error in a first forward" and number == 1:
        raise _LoopError
    if name == "an error in a second forward" and is_second:
        raise _LoopError
    if name == "no call":
        return None
    if name == "a wrong number of values":
        return values[:-1]
    if name == "another shape here":
        return values[:, None]
    if name == "another shape later" and number:
        return values[:, None]
    if name == "a loss instead":
        step.backward(values.sum())
    if name == "no tensor":
        return values.tolist()
    return values * {"an infinite value": np.inf}.get(name, 1.0)


def _bad_loss(name, rank):
    return {
        "a loss that fails": lambda gains: gains[:, 7],
        "a loss that fails here": lambda gains: gains[:, 0 if rank else 7].mean(),
        "a loss that differs": lambda gains: gains.mean() * (1 + rank),
        "a loss of each unit": lambda gains: gains[:, 0],
        "a loss without a gradient": lambda gains: gains.mean().detach(),
        "a loss that is a float": lambda gains: float(gains.mean().detach()),
        "a loss that is no number": lambda gains: gains.mean() * np.nan,
    }.get(name, mean_preference)


def troubled_steps(troubles, keep):
    """What each rank is told where rank 0 does something wrong once, and the loss of the step that comes again."""
    run, told = fragile_run(), []
    run.lr = lambda step: 0.0
    run.on_oom = lambda step, failures: None
    for trouble in ("", *troubles):
        said, is_wrong = [], bool(trouble)
        run.coupling.keep_forwards = KEPT[keep]
        while True:
            is_wrong_here = is_wrong and run.world.is_first
            run.coupling.loss_of = _bad_loss(trouble if is_wrong else "", run.world.rank)
            memory_runs._fails_at.clear()
            memory_runs._fails_at.update({trouble.removeprefix("no memory in the ")} if is_wrong_here else ())
            is_wrong = False
            try:
                step = run.step(pairs(12, seed=4)[6:9][run.world.rank :: run.world.size])
                for number, micro_batch in enumerate(step):
                    values = log_probabilities(run.model, micro_batch)
                    if is_wrong_here:
                        values = _trouble(trouble, step, run, micro_batch, values, number)
                    if trouble == "a break" and is_wrong_here:
                        break
                    if values is not None:
                        step.couple(values)
                result = step.update()
                if result is not None:
                    break
                said.append("None")
            except (_LoopError, LengthwiseError) as error:
                said.append(f"{type(error).__name__}: {error}")
        told.append((trouble, said, result.loss))
    run.close()
    return told
