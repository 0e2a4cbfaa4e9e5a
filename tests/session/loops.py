"""What ranks run in these tests: a user's own loop around a prepared model."""

import os
from collections import Counter

import numpy as np
import torch
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import lengthwise as lw
from tests.session import models


def as_started_by_torchrun() -> None:
    """Rank pools set what joins ranks; torchrun says also which of them are on this machine."""
    if "RANK" in os.environ:
        os.environ["LOCAL_WORLD_SIZE"], os.environ["LOCAL_RANK"] = os.environ["WORLD_SIZE"], os.environ["RANK"]


def step_through(run, loss_of=lambda output, micro_batch: output[1]):
    """Losses, degrees and sequences of every step that is left."""
    losses, degrees, ids = [], [], []
    for step in run.steps():
        for micro_batch in step:
            loss = loss_of(run.model(**micro_batch.inputs), micro_batch)
            step.backward(loss)
            loss.detach_()  # as loops do that keep their losses; in stages its backward comes later
        losses.append(step.update().loss)
        held = [p for p in step.plan.pipelines if p.micro_batches]
        degrees.append(sorted({pipeline.scheme.degree for pipeline in held}))
        ids.append(Counter(i for pipeline in held for m in pipeline.micro_batches for i in m.pack.ids))
    return losses, degrees, ids


def noted_schemes(run, of):
    """What ``of`` says of the scheme of each micro-batch that the run plans from now on, by its longest sequence."""
    plan_of, noted = run.planner, {}

    def plan(batch):
        step_plan = plan_of(batch)
        for pipeline in step_plan.pipelines:
            for planned in pipeline.micro_batches:
                noted[max(planned.pack.lengths)] = of(pipeline.scheme_of(planned))
        return step_plan

    run.planner = plan
    return noted


def weights_of(model):
    return {name: value.detach().numpy().copy() for name, value in model.named_parameters()}


def train_gpt(policies, options):
    """By policy: losses, degrees, sequences and weights of a plain model after the run, which then gives it back."""
    as_started_by_torchrun()
    found = {}
    for policy in policies:
        model = models.gpt()
        run = lw.prepare(model, models.rows(), cost=models.mixed_cost(), memory_gib=40, **options | {"policy": policy})
        result = step_through(run)
        tokens = torch.arange(9)[None]
        with run.plain(), torch.no_grad():
            inside = model(tokens)[0]
        run.close()
        with torch.no_grad():
            assert torch.equal(inside, model(tokens)[0])
        found[policy] = (*result, weights_of(model))
    return found


def train_in_parts(folder, *, first, last, options, make=models.gpt, decay=None):
    """Steps from the checkpoint that there is to ``last``, with another one at the end; losses and weights.

    ``decay``: of an average of the weights, which is then given instead of them.
    """
    as_started_by_torchrun()
    model = make(seed=0 if first else 7)  # weights come from the checkpoint
    if not first:
        frozen = dict(make().named_parameters())
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:  # as their user has them; checkpoints keep what is trained
                parameter.data.copy_(frozen[name])
    run = lw.prepare(model, models.rows(), cost=models.mixed_cost(), memory_gib=40, steps=last, **options)
    if not first:
        number = run.resume(folder)
        assert number == run.next_step > 0
    with run.plain():
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay or 0.0))
        if first:
            average.update_parameters(model)
        elif decay:
            average.load_state_dict(torch.load(folder / "average.pt"))
    losses = []
    for step in run.steps():
        for micro_batch in step:
            step.backward(model(**micro_batch.inputs)[1])
        losses.append(step.update().loss)
        if decay:
            with run.plain():
                average.update_parameters(model)
        if step.number == last - 1:
            if decay and run.world.is_first:
                torch.save(average.state_dict(), folder / "average.pt")
            saved = run.save(folder)  # from within the loop, as users do
            assert saved.name == f"step_{last:08}" and (saved / "state.json").is_file()
    with run.plain():
        return losses, weights_of(average.module if decay else model)


def train_video(options):
    """Losses and weights of a model of frames that learns to undo noise."""
    as_started_by_torchrun()
    model, films = models.video(), models.films()

    def inputs(micro_batch):
        clean = micro_batch.own(np.concatenate(micro_batch.sequences))
        noise = micro_batch.normal(*clean.shape[1:]).double()
        micro_batch.noise = noise
        return {"x": (clean + noise)[None]}

    run = lw.prepare(
        model,
        films,
        slot_tokens=films[0].shape[1],
        objective="every-token",
        inputs=inputs,
        loss=lambda output, micro_batch: F.mse_loss(output[0], micro_batch.noise),
        **options,
    )
    losses, degrees, _ = step_through(run, run.wrapped_model.loss_of)
    return losses, degrees, weights_of(model)
