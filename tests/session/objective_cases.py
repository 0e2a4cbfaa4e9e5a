"""Objectives of preference learning, reinforcement learning and distillation: of a micro-batch, and in a plain loop.

Every objective is written twice: ``*_alone`` calls the model with one sequence at a time, as their papers have it, and
the other one makes this rank's share of it from a micro-batch.
"""

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional as F

from lengthwise.core.errors import LengthwiseError
from lengthwise.runtime.loop.coupled_values import Coupling
from tests.plan.costs import StagesFitMore
from tests.runtime.loop.runs import plan_of
from tests.runtime.loop.test_random_plans import random_groups
from tests.session import models
from tests.session.coupled_runs import all_micro_batches
from tests.session.pairs import prepared

BETA, CLIP, TOP = 0.3, 0.2, 5
LONGEST = 30
SCALARS = ("sign", "reference_logp", "gap", "advantage", "margin", "ones")
"""Columns with a number for the sequence."""
PER_TOKEN = ("mask", "old_logps", "reference_logps", "returns", "old_values", "top_ids", "top_logps")
NORMALISERS = ("tokens", "sequences", "constant")


def sequence(rng, length=None):
    """A sequence with every column that an objective reads; its prompt, the first token at least, has no loss."""
    length = length or int(np.clip(rng.lognormal(2.0, 0.8), 1, LONGEST))
    top = rng.normal(size=(length, models.VOCAB))
    ids = np.argsort(-top)[:, :TOP]
    return {
        "input_ids": rng.integers(0, models.VOCAB, length),
        "mask": (np.arange(length) >= rng.integers(1, length + 1)).astype(np.int64),
        "sign": float(rng.choice([-1.0, 1.0])),
        "reference_logp": float(rng.normal(-4 * length, 1)),
        "gap": float(rng.normal(0.3, 1)),
        "advantage": float(rng.normal()),
        "margin": float(rng.random()),
        "ones": 1,
        "old_logps": rng.normal(-4.1, 0.3, length),
        "reference_logps": rng.normal(-4.1, 0.3, length),
        "returns": rng.normal(size=length),
        "old_values": rng.normal(size=length),
        "top_ids": ids,
        "top_logps": np.take_along_axis(top - np.log(np.exp(top).sum(-1, keepdims=True)), ids, -1),
    }


def singles(seed, count=9):
    rng = np.random.default_rng(seed)
    return [sequence(rng, 1 if number == 3 else LONGEST if number == 5 else None) for number in range(count)]


def pairs(seed, count=6):
    rng = np.random.default_rng(seed)
    return [(sequence(rng, LONGEST if number == 2 else None), sequence(rng)) for number in range(count)]


def teacher():
    return models.gpt(seed=9)


def outputs_alone(model, item):
    """[length, vocabulary] of one sequence by itself."""
    return model(torch.as_tensor(item["input_ids"])[None])[0][0]


def logps_alone(model, item):
    """[length - 1] of every token but the first."""
    tokens = torch.as_tensor(item["input_ids"])[1:]
    return outputs_alone(model, item)[:-1].log_softmax(-1).gather(-1, tokens[:, None])[:, 0]


def of_targets(item, name):
    return torch.as_tensor(item[name])[1:]


def gain_alone(model, item):
    return (logps_alone(model, item) * of_targets(item, "mask")).sum() - item["reference_logp"]


def logps_t(output, micro_batch):
    return -F.cross_entropy(output[0][0], micro_batch.labels, reduction="none", ignore_index=-100)


def gains(output, micro_batch):
    masked_t = logps_t(output, micro_batch) * micro_batch.column("mask", of="targets")
    return micro_batch.per_sequence(masked_t) - micro_batch.column_by_sequence("reference_logp")


def dpo_alone(model, items, _):
    """Rafailov et al. (2023), equation 7."""
    margins = [gain_alone(model, chosen) - gain_alone(model, rejected) for chosen, rejected in items]
    return torch.stack([-F.logsigmoid(BETA * margin) for margin in margins]).mean()


def dpo(run, step, micro_batch, _):
    chosen, rejected = gains(run.model(**micro_batch.inputs), micro_batch)[micro_batch.units].unbind(1)
    return -F.logsigmoid(BETA * (chosen - rejected)).mean(), "units"


def reward_alone(model, items, _):
    """Bradley and Terry with a margin (Touvron et al., 2023, equation 2); the reward is an output of the last token."""
    rewards = [[outputs_alone(model, member)[-1, 0] for member in pair] for pair in items]
    margins = [pair[0]["margin"] for pair in items]
    losses = [-F.logsigmoid(chosen - rejected - m) for (chosen, rejected), m in zip(rewards, margins)]
    return torch.stack(losses).mean()


def reward(run, step, micro_batch, _):
    scores_t = run.model(**micro_batch.inputs)[0][0, :, 0]
    rewards = micro_batch.per_sequence(torch.where(micro_batch.is_last, scores_t, 0.0))
    chosen, rejected = rewards[micro_batch.units].unbind(1)
    margin = micro_batch.column_by_sequence("margin")[micro_batch.units[:, 0]]
    return micro_batch.mean(-F.logsigmoid(chosen - rejected - margin), over="units"), "step"


def kto_alone(model, items, _):
    """Ethayarajh et al. (2024), equation 8; the baseline is the batch's, without a gradient."""
    baseline = max(0.0, float(np.mean([item["gap"] for item in items])))
    losses = [1 - torch.sigmoid(BETA * item["sign"] * (gain_alone(model, item) - baseline)) for item in items]
    return torch.stack(losses).mean()


def kto(run, step, micro_batch, _):
    baseline = max(0.0, step.total("gap", over="sequences") / step.total("ones", over="sequences"))
    of_sequences = gains(run.model(**micro_batch.inputs), micro_batch)
    losses = 1 - torch.sigmoid(BETA * micro_batch.column_by_sequence("sign") * (of_sequences - baseline))
    return losses.mean(), "units"


def surrogate(logps, old, advantage):
    ratio = (logps - old).exp()
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)


def grpo_alone(model, items, normaliser):
    """Shao et al. (2024), equation 3, with its unbiased estimate of the divergence; three ways to take the mean."""
    total, num_tokens = torch.zeros(()), sum(int(item["mask"].sum()) for item in items)
    for item in items:
        logps, mask = logps_alone(model, item), of_targets(item, "mask")
        gap = of_targets(item, "reference_logps") - logps
        losses = surrogate(logps, of_targets(item, "old_logps"), item["advantage"]) + BETA * (gap.exp() - gap - 1)
        weight = {
            "tokens": 1 / num_tokens,
            "sequences": 1 / (len(items) * max(1, int(mask.sum()))),
            "constant": 1 / 300,
        }[normaliser]
        total = total + (losses * mask).sum() * weight
    return total


def grpo(run, step, micro_batch, normaliser):
    logps = logps_t(run.model(**micro_batch.inputs), micro_batch)
    old, expected, advantage, mask = (
        micro_batch.column(name, of="targets") for name in ("old_logps", "reference_logps", "advantage", "mask")
    )
    gap = expected - logps
    losses_t = (surrogate(logps, old, advantage) + BETA * (gap.exp() - gap - 1)) * mask
    if normaliser == "sequences":
        means = micro_batch.per_sequence(losses_t) / micro_batch.per_sequence(mask).clamp(min=1)
        return micro_batch.sum(means, over="units") / step.total("ones", over="sequences"), "step"
    return micro_batch.sum(losses_t) / (300 if normaliser == "constant" else step.total("mask")), "step"


def ppo_alone(model, items, _):
    """Schulman et al. (2017), equation 9, with clipped values; an output of each token is its value."""
    total, count = torch.zeros(()), sum(int(item["mask"].sum()) for item in items)
    for item in items:
        outputs, mask = outputs_alone(model, item)[:-1], of_targets(item, "mask")
        values, old, returns = outputs[:, 1], of_targets(item, "old_values"), of_targets(item, "returns")
        clipped = old + (values - old).clamp(-CLIP, CLIP)
        value_losses = torch.maximum((values - returns) ** 2, (clipped - returns) ** 2) / 2
        logps = outputs.log_softmax(-1)
        entropy = -(logps.exp() * logps).sum(-1)
        policy = surrogate(logps_alone(model, item), of_targets(item, "old_logps"), returns - old)
        total = total + ((policy + 0.5 * value_losses - 0.01 * entropy) * mask).sum() / count
    return total


def ppo(run, step, micro_batch, _):
    output = run.model(**micro_batch.inputs)
    values = output[0][0, :, 1]
    old_logps, old, returns, mask = (
        micro_batch.column(name, of="targets") for name in ("old_logps", "old_values", "returns", "mask")
    )
    clipped = old + (values - old).clamp(-CLIP, CLIP)
    value_losses_t = torch.maximum((values - returns) ** 2, (clipped - returns) ** 2) / 2
    logps = output[0][0].log_softmax(-1)
    entropy_t = -(logps.exp() * logps).sum(-1)
    losses_t = surrogate(logps_t(output, micro_batch), old_logps, returns - old) + 0.5 * value_losses_t
    return micro_batch.sum((losses_t - 0.01 * entropy_t) * mask) / step.total("mask"), "step"


def top_alone(model, items, _):
    """The divergence from a teacher's most likely tokens, over all tokens."""
    total = torch.zeros(())
    for item in items:
        ids, expected = torch.as_tensor(item["top_ids"]), torch.as_tensor(item["top_logps"])
        student = outputs_alone(model, item).log_softmax(-1).gather(-1, ids)
        total = total + (expected.exp() * (expected - student)).sum()
    return total / sum(len(item["input_ids"]) for item in items)


def top(run, step, micro_batch, _):
    student = run.model(**micro_batch.inputs)[0][0].log_softmax(-1).gather(-1, micro_batch.column("top_ids"))
    expected = micro_batch.column("top_logps")
    return micro_batch.sum((expected.exp() * (expected - student)).sum(-1)) / step.total("ones"), "step"


def full_alone(model, items, _):
    """Hinton et al. (2015): the divergence from all that a teacher beside the student says."""
    frozen, total = teacher(), torch.zeros(())
    for item in items:
        with torch.no_grad():
            expected = outputs_alone(frozen, item).log_softmax(-1)
        total = total + F.kl_div(outputs_alone(model, item).log_softmax(-1), expected, log_target=True, reduction="sum")
    return total / sum(len(item["input_ids"]) for item in items)


def full(run, step, micro_batch, _):
    (frozen,) = (wrapped.model for wrapped in run.frozen_models)
    with torch.no_grad():
        expected = frozen(**micro_batch.inputs)[0].log_softmax(-1)
    student = run.model(**micro_batch.inputs)[0].log_softmax(-1)
    divergence = F.kl_div(student, expected, log_target=True, reduction="none").sum(-1)
    return micro_batch.mean(divergence, over="tokens"), "step"


def ipo_alone(model, items, _):
    """Azar et al. (2024), equation 17."""
    margins = torch.stack([gain_alone(model, chosen) - gain_alone(model, rejected) for chosen, rejected in items])
    return ((margins - 1 / (2 * BETA)) ** 2).mean()


def coupled_dpo(gains):
    return -F.logsigmoid(BETA * (gains[:, 0] - gains[:, 1])).mean()


def coupled_ipo(gains):
    return ((gains[:, 0] - gains[:, 1] - 1 / (2 * BETA)) ** 2).mean()


def values_gain(run, step, micro_batch, _):
    return gains(run.model(**micro_batch.inputs), micro_batch)


def coupled_reward(values):
    (chosen, rejected), margin = values[..., 0].unbind(1), values[:, 0, 1]
    return -F.logsigmoid(chosen - rejected - margin).mean()


def values_reward(run, step, micro_batch, _):
    scores_t = run.model(**micro_batch.inputs)[0][0, :, 0]
    rewards = micro_batch.per_sequence(torch.where(micro_batch.is_last, scores_t, 0.0))
    return torch.stack([rewards, micro_batch.column_by_sequence("margin")], -1)


def coupled_kto(values):
    of_sequences, sign, gap = values.unbind(-1)
    baseline = gap.mean().clamp(min=0)
    return (1 - torch.sigmoid(BETA * sign * (of_sequences - baseline))).mean()


def values_kto(run, step, micro_batch, _):
    of_sequences = gains(run.model(**micro_batch.inputs), micro_batch)
    columns = [micro_batch.column_by_sequence(name) for name in ("sign", "gap")]
    return torch.stack([of_sequences, *columns], -1)


def contrast(embedded, temperature=0.2):
    """Every query against the documents of all units of the batch (van den Oord et al., 2018, equation 4)."""
    queries, documents = F.normalize(embedded, dim=-1).unbind(1)
    return F.cross_entropy(queries @ documents.T / temperature, torch.arange(len(queries)))


def contrast_alone(model, items, _):
    return contrast(torch.stack([torch.stack([outputs_alone(model, m).mean(0)[:8] for m in pair]) for pair in items]))


def values_embedded(run, step, micro_batch, _):
    outputs_t = run.model(**micro_batch.inputs)[0][0, :, :8]
    counts = micro_batch.per_sequence(torch.ones(len(outputs_t)))
    return micro_batch.per_sequence(outputs_t) / counts[:, None]


@dataclass(frozen=True)
class Objective:
    """An objective: of a batch in a plain loop, and this rank's loss of a micro-batch with what it is a mean over."""

    alone: Callable
    of_micro_batch: Callable
    batch: Callable = singles
    variant: str = ""
    coupled: Callable | None = None
    """The loss of the whole step, of what ``of_micro_batch`` returns of every sequence."""


OBJECTIVES = {
    "dpo": Objective(dpo_alone, dpo, batch=pairs),
    "reward": Objective(reward_alone, reward, batch=pairs),
    "kto": Objective(kto_alone, kto),
    "ppo": Objective(ppo_alone, ppo),
    "top of a teacher": Objective(top_alone, top),
    "all of a teacher": Objective(full_alone, full),
    "coupled dpo": Objective(dpo_alone, values_gain, batch=pairs, coupled=coupled_dpo),
    "coupled ipo": Objective(ipo_alone, values_gain, batch=pairs, coupled=coupled_ipo),
    "coupled reward": Objective(reward_alone, values_reward, batch=pairs, coupled=coupled_reward),
    "coupled kto": Objective(kto_alone, values_kto, coupled=coupled_kto),
    "coupled contrast": Objective(contrast_alone, values_embedded, batch=pairs, coupled=contrast),
    **{f"grpo by {name}": Objective(grpo_alone, grpo, variant=name) for name in NORMALISERS},
}


def step_alone(name, seed):
    """The loss and the gradients of a batch in a plain loop on one device."""
    objective, model = OBJECTIVES[name], models.gpt()
    loss = objective.alone(model, objective.batch(seed), objective.variant)
    loss.backward()
    return float(loss.detach()), {name: parameter.grad for name, parameter in model.named_parameters()}


def gradient_errors(cases, expected, most_stages=1, **options):
    """The largest error of loss and of this rank's share of the gradient, for each case, and the degrees of plans.

    ``cases``: names of objectives, seeds of batches and seeds of plans; ``expected``: by name and seed of a batch.
    ``options``: of prepare.
    """
    errors, degrees = [], set()
    for make, is_coupled in itertools.product((singles, pairs), (False, True)):
        kind = make, is_coupled
        of_kind = [case for case in cases if (OBJECTIVES[case[0]].batch, bool(OBJECTIVES[case[0]].coupled)) == kind]
        if not of_kind:
            continue
        beside = {"check": True} if most_stages > 1 else {"frozen": [teacher()] if make is singles else []}
        run = learning_run(make, coupled_loss=contrast if is_coupled else None, **beside, **options)
        run.keep_layers = lambda plan: plan.num_phases - 1
        for name, seed, plan_seed in of_kind:
            loss, gradients = expected[name, seed]
            result, pushed, used = planned_step(run, OBJECTIVES[name], make(seed), plan_seed, most_stages)
            error = float((pushed - own_share(run, gradients)).abs().max())
            errors.append((max(abs(result.loss - loss), error), name, seed, plan_seed))
            degrees |= used
        run.close()
    return errors, degrees


def planned_step(run, objective, items, plan_seed, most_stages=1):
    """A step of items that are anywhere under a plan that is any: its result, gradient and degrees."""
    rng, num_layers, size = random.Random(plan_seed), run.wrapped_model.structure.num_layers, run.world.size
    owners = [rng.randrange(size) for _ in items]
    if rng.random() < 0.2:
        owners = [rng.randrange(size)] * len(items)  # one rank has all
    planned_items = 2 * len(items) if objective.coupled and objective.batch is pairs else len(items)
    groups = random_groups(rng, size, num_layers, num_sequences=planned_items, most_stages=most_stages)
    run.planner = lambda batch: plan_of(batch, groups, num_layers)
    run.wrapped_model.layers.may_keep_attention = True
    seen = []
    run.on_finish = lambda step: seen.append(run.state.pushed.clone())
    run.lr = lambda step: 0.0
    share = rng.choice([0.0, 0.5, 1.0])
    if objective.coupled:
        run.coupling = Coupling(
            loss_of=objective.coupled,
            keep_forwards=lambda plan: frozenset(key for key in all_micro_batches(plan) if rng.random() < share),
        )
    step = run.step([item for item, owner in zip(items, owners) if owner == run.world.rank])
    for micro_batch in step:
        made = objective.of_micro_batch(run, step, micro_batch, objective.variant)
        if objective.coupled:
            step.couple(made)
        else:
            step.backward(made[0], mean_over=made[1])
    result = step.update()
    return result, seen[0], {pipeline.scheme.degree for pipeline in step.plan.pipelines if pipeline.micro_batches}


def planned_in_stages(name, seed, gradients):
    """Loss, error of the gradient and stages of a step of items of which a device holds none, without sharing."""
    objective, cost = OBJECTIVES[name], StagesFitMore(capacity=30, loss=0.4, c_s=0.05)
    options = {"cost": cost, "memory_gib": 30, "max_degree": 1, "recompute": "none", "policy": "static", "check": True}
    run, pushed = learning_run(objective.batch, **options), []
    run.on_finish, run.lr = lambda step: pushed.append(run.state.pushed.clone()), lambda step: 0.0
    step = run.step(objective.batch(seed)[run.world.rank :: run.world.size])
    for micro_batch in step:
        loss, mean_over = objective.of_micro_batch(run, step, micro_batch, objective.variant)
        step.backward(loss, mean_over=mean_over)
    result = step.update()
    error = float((pushed[0] - own_share(run, gradients)).abs().max())
    stages = {pipeline.scheme.num_stages for pipeline in step.plan.pipelines if pipeline.micro_batches}
    run.close()
    return result.loss, error, stages


def own_share(run, gradients):
    """This rank's share of gradients by name, as the run keeps them."""
    return torch.cat([
        gradients[slot.name].flatten()[max(a, slot.start) - slot.start : max(0, b - slot.start)]
        for a, b in run.state.owned_layout.intervals[run.world.rank] for slot in run.state.table.slots.values()
    ])  # fmt: skip


def refused(make, bad_by_rank):
    """What every rank is told of bad items, and the loss of a good step after all of them."""
    run, told = learning_run(make), []
    for bad in bad_by_rank:
        try:
            run.step(bad[run.world.rank])
        except LengthwiseError as error:
            told.append((type(error).__name__, str(error)))
        else:
            told.append(None)
    result, *_ = planned_step(run, OBJECTIVES["dpo" if make is pairs else "kto"], make(1), 0)
    run.close()
    return told, result.loss


def troubled(troubles):
    """What every rank is told where the loop of rank 0 goes wrong once, and the loss of the step that comes again."""
    run, told = learning_run(singles), []
    for trouble in troubles:
        said = []
        while True:
            is_wrong = run.world.is_first and not said
            try:
                step = run.step(singles(2 + run.world.rank))
                name = "nonesuch" if is_wrong and trouble == "a wrong total" else "mask"
                total = step.total(name)
                for micro_batch in step:
                    loss = troubled_loss(run, micro_batch, trouble if is_wrong else "") / total
                    step.backward(loss, mean_over="step")
                result = step.update()
            except LengthwiseError as error:
                said.append(str(error))
            else:
                break
        told.append((trouble, said, result.loss))
    run.close()
    return told


def troubled_loss(run, micro_batch, trouble):
    logps = logps_t(run.model(**micro_batch.inputs), micro_batch)
    mask = micro_batch.column("nonesuch" if trouble == "a wrong column" else "mask", of="targets")
    loss = micro_batch.sum((logps * mask)[1 if trouble == "a wrong shape" else 0 :])
    return loss * {"an infinite loss": np.inf, "a loss that is no number": np.nan}.get(trouble, 1.0)


def learning_run(make, **options):
    """A run of items that learns from them, hardly."""
    return prepared(
        make(0), sequences_per_step=6, loss_columns=SCALARS + PER_TOKEN, step_max_length=2 * LONGEST,
        **{"lr": 1e-9} | options,
    )  # fmt: skip
