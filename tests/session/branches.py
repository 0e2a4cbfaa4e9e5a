"""Groups of answers to one prompt, losses over them, and the same in a plain loop with every answer by itself."""

import numpy as np
import torch
from torch.nn import functional as F

from tests.runtime.wrap.test_position_masks import CASES
from tests.session import models
from tests.session.loops import weights_of
from tests.session.pairs import BETA, prepared, reference, train_plainly

COLUMNS = ("advantage", "old_logps", "weight", "completion")
MEMBERS, GROUPS_A_STEP, STEPS = 3, 4, 2
LOSSES = ("targets", "clipped", "weighted", "tokens", "sequences", "preference")


def groups(count=8, *, seed=0, longest=20, vocab=models.VOCAB):
    """Three conversations of each prompt, two of which go on with the same turn; the last turn of each has a loss.

    The first group shares nothing, the second all but an answer of one token, the third a prompt of one token.
    """
    rng = np.random.default_rng(seed)

    def turn(length=None):
        return rng.integers(3, vocab, int(rng.integers(1, longest)) if length is None else length)

    def member(prompt, answer):
        tokens = np.concatenate([prompt, answer])
        return {
            "input_ids": tokens,
            "labels": np.where(np.arange(len(tokens)) < len(prompt), -100, tokens),
            "advantage": float(rng.normal()),
            "old_logps": rng.normal(-4.1, 0.3, len(tokens)),
            "weight": rng.normal(size=len(tokens)),
            "completion": (np.arange(len(tokens)) >= len(prompt)).astype(np.int64),
        }

    found = []
    for number in range(count):
        prompt = turn(1 if number == 2 else None)
        going_on = np.concatenate([prompt, turn()])
        answers = [turn(1 if number == 1 else None) for _ in range(MEMBERS)]
        prompts = [going_on, prompt, going_on]
        if number == 0:
            prompts = [turn(9)[offset:] for offset in (0, 1, 2)]
            prompts = [np.concatenate([[first], rest]) for first, rest in enumerate(prompts)]
        found.append(tuple(map(member, prompts, answers)))
    return found


def token_logps(logits, labels):
    return -F.cross_entropy(logits, labels, reduction="none", ignore_index=-100)


def clipped(logps, old, advantage):
    ratio = (logps - old).exp()
    return -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)


def preference(gains):
    """Of [u, M] gains: the first sequence of each unit against the mean of the others."""
    return -F.logsigmoid(BETA * (gains[:, 0] - gains[:, 1:].mean(1)))


def _gain(model, frozen, member):
    tokens, labels = (torch.as_tensor(member[name]) for name in ("input_ids", "labels"))
    with torch.no_grad():
        expected = token_logps(frozen(tokens[None])[0][0, :-1], labels[1:]).sum()
    return token_logps(model(tokens[None])[0][0, :-1], labels[1:]).sum() - expected


def loss_alone(model, units, kind):
    """The loss of a step in a plain loop."""
    members = [member for unit in units for member in unit]
    if kind == "preference":
        frozen = reference()
        return preference(torch.stack([torch.stack([_gain(model, frozen, m) for m in unit]) for unit in units])).mean()
    terms, sizes = [], []
    for member in members:
        tokens, labels = (torch.as_tensor(member[name]) for name in ("input_ids", "labels"))
        logits = model(tokens[None])[0][0]
        next_labels = torch.cat([labels[1:], torch.tensor([-100])])
        logps, mask = token_logps(logits, next_labels), (next_labels != -100).double()
        after = {
            name: torch.cat([torch.as_tensor(member[name])[1:], torch.zeros(1)]) for name in ("old_logps", "weight")
        }
        if kind == "targets":
            terms.append(-logps.sum())
        elif kind == "clipped":
            terms.append((clipped(logps, after["old_logps"], member["advantage"]) * mask).sum())
        elif kind == "weighted":  # linear in a column that differs where tokens are shared
            terms.append((logits[:, 0] * torch.as_tensor(member["weight"]) + logits[:, 1] * after["weight"]).sum())
        else:
            terms.append(logits[:, 0].square().sum() / (len(tokens) if kind == "sequences" else 1))
        sizes.append(int(mask.sum()) if kind in ("targets", "clipped") else len(tokens))
    count = {"weighted": 100, "sequences": len(members)}.get(kind, sum(sizes))
    return sum(terms) / count


def loss_of(run, step, micro_batch, kind, frozen):
    """This rank's share of it, and what it is a mean over."""
    logits, mean = run.model(**micro_batch.inputs)
    logits, values = logits[0], logits[0][:, 0].square()
    if kind == "targets":
        return mean, None
    if kind == "clipped":
        logps, mask = token_logps(logits, micro_batch.labels), micro_batch.labels != -100
        old, advantage = (micro_batch.column(name, of="targets") for name in ("old_logps", "advantage"))
        return micro_batch.sum(clipped(logps, old, advantage) * mask) / step.total("completion"), "step"
    if kind == "weighted":
        after = micro_batch.column("weight", of="targets")
        return micro_batch.sum(logits[:, 0] * micro_batch.column("weight") + logits[:, 1] * after) / 100, "step"
    if kind in ("tokens", "sequences"):
        return micro_batch.mean(values, over=kind), "step"
    logps = micro_batch.per_sequence(token_logps(logits, micro_batch.labels))
    with torch.no_grad():
        expected = micro_batch.per_sequence(token_logps(frozen(**micro_batch.inputs)[0][0], micro_batch.labels))
    return preference((logps - expected)[micro_batch.units]).mean(), "units"


def train(ways, via="corpus"):
    """Losses, degrees, computed tokens and weights by way."""
    found = []
    for way in ways:
        frozen, kind = reference(), way["kind"]
        options = {name: value for name, value in way.items() if name != "kind"}
        run = prepared(
            groups(), frozen=[frozen] * (kind == "preference"), loss_columns=COLUMNS, count_targets=True,
            **{"sequences_per_step": GROUPS_A_STEP, "steps": STEPS, "share_prefixes": True} | options,
        )  # fmt: skip
        losses, degrees, computed = [], set(), 0
        for step in run.steps() if via == "corpus" else map(run.step, _own(run)):
            for micro_batch in step:
                loss, mean_over = loss_of(run, step, micro_batch, kind, frozen)
                step.backward(loss, mean_over=mean_over)
            losses.append(step.update().loss)
            held = [pipeline for pipeline in step.plan.pipelines if pipeline.micro_batches]
            degrees |= {pipeline.scheme.degree for pipeline in held}
            computed += sum(m.pack.num_tokens for pipeline in held for m in pipeline.micro_batches)
        run.close()
        found.append((losses, degrees, computed, weights_of(run.model)))
    return found


def brought():
    """The groups of each step, which the ranks bring themselves."""
    return [groups(5 + step, seed=7 + step) for step in range(STEPS)]


def _own(run):
    return [units[run.world.rank :: run.world.size] for units in brought()]


def train_alone(kind, batches):
    """The same in a plain loop; ``batches``: the units of each step."""
    return train_plainly(lambda model, units: loss_alone(model, units, kind), batches)


def score(per):
    """What this rank's groups say by token or by sequence, and the groups."""
    run = prepared(groups(), loss_columns=COLUMNS, sequences_per_step=GROUPS_A_STEP, share_prefixes=True)
    own = _own(run)[0]

    def values(output, micro_batch):
        of_slots = output[0][0][:, 0]
        return of_slots if per == "token" else micro_batch.per_sequence(of_slots)

    scores = run.score(own, values, per=per)
    run.close()
    return scores, own


FAMILIES = ("Gemma 2: soft-capped logits", "gpt-oss: attention sinks")


def train_families(names, ways):
    """Degrees, and weights after a step with what groups share computed once, and with every sequence by itself."""
    found = {}
    for name, way in ((name, way) for name in names for way in ways):
        weights, degrees = [], set()
        for share in (True, False):
            torch.manual_seed(1)
            run = prepared(
                groups(4, longest=9, vocab=37), model=CASES[name].build().double(), share_prefixes=share,
                sequences_per_step=4, steps=1, policy="static", loss_columns=COLUMNS, recompute="none", **way,
            )  # fmt: skip
            for step in run.steps():
                for micro_batch in step:
                    step.backward(run.model(**micro_batch.inputs).loss)
                step.update()
                degrees |= {p.scheme.degree for p in step.plan.pipelines if p.micro_batches} if share else set()
            run.close()
            weights.append(weights_of(run.model))
        found[name, str(way)] = degrees, *weights
    return found
