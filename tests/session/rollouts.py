"""Rollouts that ranks bring to a step, objectives over them, and the same in a plain loop on one device."""

import numpy as np
import torch
from torch.nn import functional as F

from lengthwise.runtime.loop.loop_ledger import LoopLedger
from tests.session import models
from tests.session.loops import weights_of
from tests.session.pairs import LR, prepared

COLUMNS = ("advantage", "old_logps", "completion")
CLIP = 0.2


def rollouts(count, *, seed=0, longest=40):
    """Prompts and answers of ragged lengths; of the answer's tokens the log-probabilities of a policy before."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        length = int(np.clip(rng.lognormal(2.3, 0.8), 2, longest))
        prompt = int(rng.integers(1, length))
        found.append(
            {
                "input_ids": rng.integers(0, models.VOCAB, length),
                "advantage": float(rng.normal()),
                "old_logps": rng.normal(-4.1, 0.3, length),
                "completion": (np.arange(length) >= prompt).astype(np.int64),
            }
        )
    return found


def batches(num_steps=3, *, seed=5):
    """The rollouts of each step: of other lengths than the examples that the run was prepared with."""
    return [rollouts(9 + 2 * step, seed=seed + step, longest=48) for step in range(num_steps)]


def of_rank(items, rank, size):
    """What a rank brings: ragged shares, and nothing on the second of three ranks."""
    bounds = {1: (0, 1.0), 2: (0, 0.3, 1.0), 3: (0, 0.7, 0.7, 1.0)}[size]
    first, end = (round(bound * len(items)) for bound in bounds[rank : rank + 2])
    return items[first:end]


def surrogate(logps, old, advantage):
    """PPO's clipped surrogate of each token."""
    ratio = (logps - old).exp()
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)


def token_logps(logits, labels):
    return -F.cross_entropy(logits, labels, reduction="none", ignore_index=-100)


def grpo_alone(model, items, normaliser):
    """The loss of a step in a plain loop: a masked sum over a normaliser."""
    total, count = torch.zeros(()), sum(int(item["completion"].sum()) for item in items)
    for item in items:
        tokens = torch.as_tensor(item["input_ids"])
        logps = token_logps(model(tokens[None])[0][0, :-1], tokens[1:])
        losses = surrogate(logps, torch.as_tensor(item["old_logps"])[1:], item["advantage"])
        mask = torch.as_tensor(item["completion"])[1:]
        share = {"tokens": 1 / count, "items": 1 / (len(items) * max(1, int(mask.sum()))), "constant": 1 / 512}
        total = total + (losses * mask).sum() * share[normaliser]
    return total


def train_grpo_alone(normaliser, num_steps=3):
    model, losses = models.gpt(), []
    for items in batches(num_steps):
        loss = grpo_alone(model, items, normaliser)
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= LR * parameter.grad
                parameter.grad = None
        losses.append(float(loss.detach()))
    return losses, weights_of(model)


def grpo_loss(run, step, micro_batch, normaliser):
    """The same of a micro-batch: this rank's share of the step's loss."""
    logps = token_logps(run.model(**micro_batch.inputs)[0][0], micro_batch.labels)
    old, advantage, mask = (micro_batch.column(name, of="targets") for name in ("old_logps", "advantage", "completion"))
    losses = surrogate(logps, old, advantage) * mask
    if normaliser == "items":
        of_sequence = micro_batch.per_sequence(losses) / micro_batch.per_sequence(mask).clamp(min=1)
        return micro_batch.sum(of_sequence, over="units") / step.total("ones", over="sequences")
    return micro_batch.sum(losses) / (512 if normaliser == "constant" else step.total("completion"))


def train_grpo(ways, via="step"):
    """Losses, degrees and weights by way, of items that ranks bring."""
    found = []
    for way in ways:
        options = {name: value for name, value in way.items() if name != "normaliser"}
        examples = [item | {"ones": 1} for item in rollouts(12, longest=36)]
        run = prepared(
            examples, sequences_per_step=8, loss_columns=(*COLUMNS, "ones"), step_max_length=48, **options
        )  # fmt: skip
        world = run.world
        own = [[item | {"ones": 1} for item in of_rank(items, world.rank, world.size)] for items in batches()]
        losses, degrees = [], set()
        for step in run.steps(own) if via == "steps" else map(run.step, own):
            for micro_batch in step:
                step.backward(grpo_loss(run, step, micro_batch, way["normaliser"]), mean_over="step")
            losses.append(step.update().loss)
            degrees |= {pipeline.scheme.degree for pipeline in step.plan.pipelines if pipeline.micro_batches}
        items = [item for of_step in batches() for item in of_step]
        counts = {"updates": 3, "sequences": len(items), "tokens": sum(len(item["input_ids"]) for item in items)}
        assert run.ledger == LoopLedger(**counts)
        run.close()
        found.append((losses, degrees, weights_of(run.model)))
    return found


def score(options):
    """Log-probabilities by token and by sequence of what this rank brings, and the rank's items."""
    run = prepared([{"input_ids": row} for row in models.rows(12)], sequences_per_step=8, step_max_length=48, **options)
    world, items = run.world, [{"input_ids": item["input_ids"]} for item in batches(2)[1]]
    own = of_rank(items, world.rank, world.size)
    before = weights_of(run.model) if run.gather is None else None

    def logps(output, micro_batch):
        return token_logps(output[0][0], micro_batch.labels)

    by_token = run.score(own, logps)
    by_sequence = run.score(own, lambda output, mb: mb.per_sequence(logps(output, mb)), per="sequence")
    for step in run.steps([own]):  # a step after it is as exact as one before
        for micro_batch in step:
            step.backward(run.model(**micro_batch.inputs)[1])
        loss = step.update().loss
    after = weights_of(run.model) if run.gather is None else None
    run.close()
    assert before is None or any((before[name] != after[name]).any() for name in before)
    return by_token, by_sequence, [item["input_ids"] for item in own], loss


def fail_to_score(options, failure):
    """What each rank is told where the last one fails while it scores; the same scores after it, and a step's loss."""
    run = prepared([{"input_ids": row} for row in models.rows(12)], sequences_per_step=8, step_max_length=48, **options)
    own = of_rank([{"input_ids": item["input_ids"]} for item in batches(2)[1]], run.world.rank, run.world.size)
    due, errors = [failure] if run.world.rank == run.world.size - 1 else [], []

    def run_out(*_):
        if due == ["memory"]:
            due.clear()
            raise torch.OutOfMemoryError("no memory is left")

    def sums(output, micro_batch):
        if due == ["function"]:
            due.clear()
            raise KeyError("no such reward")
        return micro_batch.per_sequence(token_logps(output[0][0], micro_batch.labels))

    run.model.blocks[1].mlp.register_forward_pre_hook(run_out)
    try:
        run.score(own, sums, per="sequence")
    except Exception as error:
        errors.append((type(error).__name__, str(error)))
    scores = [float(score) for score in run.score(own, sums, per="sequence")]
    for step in run.steps([own]):
        for micro_batch in step:
            step.backward(run.model(**micro_batch.inputs)[1])
        loss = step.update().loss
    run.close()
    return errors, scores, [item["input_ids"] for item in own], loss


def bring(items_by_rank, options=None):
    """The error of a step of these items, by what each rank brings."""
    run = prepared([{"input_ids": row} for row in models.rows(12)], sequences_per_step=8, **(options or {}))
    try:
        run.step(items_by_rank[run.world.rank])
    except Exception as error:
        return type(error).__name__, str(error)
    finally:
        run.close()
    return None


def score_beside_step(options):
    """The error of a rank that scores while the other one steps."""
    run = prepared([{"input_ids": row} for row in models.rows(12)], sequences_per_step=8, **options)
    try:
        items = [{"input_ids": [1, 2, 3]}]
        if run.world.is_first:
            run.step(items)
        else:
            run.score(items, lambda output, micro_batch: output[0][0, :, 0])
    except Exception as error:
        return str(error)
    finally:
        run.close()
    return None


def degrees_of_forwards(options):
    """Degrees by which a step and scores of the same items are computed, and whether scores recompute layers."""
    run = prepared([{"input_ids": row} for row in models.rows(12)], sequences_per_step=8, step_max_length=48, **options)
    own = of_rank([{"input_ids": item["input_ids"]} for item in batches(2)[1]], run.world.rank, run.world.size)
    recomputed = []

    def degrees(output, micro_batch):
        recomputed.extend(micro_batch.shard.recompute)
        return torch.full((micro_batch.shard.num_slots,), float(micro_batch.degree))

    scored = {int(value) for values in run.score(own, degrees) for value in values}
    step = run.step(own)
    for micro_batch in step:
        step.backward(run.model(**micro_batch.inputs)[1])
    step.update()
    run.close()
    return {p.scheme.degree for p in step.plan.pipelines if p.micro_batches}, scored, any(recomputed)
