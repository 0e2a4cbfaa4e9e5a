"""Runs whose units of sequences with shared prefixes are cut, as no group of ranks holds them whole."""

import torch
from torch import nn

from lengthwise.core.errors import LengthwiseError
from tests.plan.costs import SimpleCost
from tests.session import models
from tests.session.branches import COLUMNS, GROUPS_A_STEP, MEMBERS, STEPS, brought, groups, loss_of, token_logps
from tests.session.coupled_runs import spread
from tests.session.loops import weights_of
from tests.session.pairs import prepared


def tight_options(num_ranks, *, brings=False):
    """Options under which all ranks together hold each sequence, and not every group; ``brings``: of those brought."""
    units = [unit for of_step in brought() for unit in of_step] if brings else groups()
    longest = max(len(member["input_ids"]) for unit in [*units, *groups()] for member in unit)
    capacity = -(-longest // num_ranks)
    return {"cost": SimpleCost(capacity=capacity)} | ({"step_max_length": capacity * num_ranks} if brings else {})


def _run(way, items=None):
    options = {name: value for name, value in way.items() if name not in ("kind", "via")}
    defaults = {
        "cut_units": True, "share_prefixes": True, "count_targets": True, "recompute": "none",
        "sequences_per_step": GROUPS_A_STEP, "steps": STEPS, "loss_columns": COLUMNS,
    }  # fmt: skip
    return prepared(groups() if items is None else items, **defaults | options)


def train_cut(ways):
    """By way: losses, tokens that steps computed and that they repeated, the ledger's sequences, tokens and repeated
    tokens, and weights."""
    results = []
    for way in ways:
        run = _run(way)
        losses, computed, repeated = [], 0, 0
        own = [units[run.world.rank :: run.world.size] for units in brought()]
        for step in map(run.step, own) if way.get("via") == "step" else run.steps():
            for micro_batch in step:
                if "coupled_loss" in way:
                    logits = run.model(**micro_batch.inputs)[0][0]
                    step.couple(micro_batch.per_sequence(token_logps(logits, micro_batch.labels)))
                    continue
                loss, mean_over = loss_of(run, step, micro_batch, way["kind"], None)
                step.backward(loss, mean_over=mean_over)
            computed += sum(sum(m.pack.lengths) for p in step.plan.pipelines for m in p.micro_batches)
            result = step.update()
            losses.append(result.loss)
            repeated += result.repeated_tokens
        run.close()
        ledger = run.ledger.sequences, run.ledger.tokens, run.ledger.repeated_tokens
        results.append((losses, computed, repeated, ledger, weights_of(run.model)))
    return results


def train_for_balance():
    """Losses, the ranks of the parts of each unit, and weights of steps of one group, which both ranks would share."""
    cost = SimpleCost(capacity=1000, b_s=1.0, c_s=0.001, loss=5.0)
    run, losses, ranks = _run({"cost": cost, "policy": "auto", "step_max_length": 60}), [], []
    for unit in groups()[3:6]:
        step = run.step([unit] if run.world.is_first else [])
        for micro_batch in step:
            loss, mean_over = loss_of(run, step, micro_batch, "clipped", None)
            step.backward(loss, mean_over=mean_over)
        planned = [(p.ranks, number) for p in step.plan.pipelines for m in p.micro_batches for number in m.pack.ids]
        ranks.append(sorted(of_part for of_part, number in planned if number in run.collator.units.parts))
        losses.append(step.update().loss)
    run.close()
    return losses, ranks, weights_of(run.model)


def spread_alone(model, units):
    """The loss of a step of all of its groups in a plain loop."""
    values = []
    for member in (member for unit in units for member in unit):
        tokens, labels = (torch.as_tensor(member[name]) for name in ("input_ids", "labels"))
        logits = model(tokens[None])[0][0]
        values.append(token_logps(logits[:-1], labels[1:]).sum())
    return spread(torch.stack(values).view(-1, MEMBERS))


def gradients_with_dropout():
    """The gradient of a step with dropout, with groups whole and with some that are cut, and repeated tokens."""
    whole = {"cost": SimpleCost(capacity=1000), "cut_units": False}
    return [_gradient_with_dropout(way) for way in (whole, tight_options(2))]


def _gradient_with_dropout(way):
    model, gradients = models.gpt(), []
    for block in model.blocks:
        block.mlp = nn.Sequential(block.mlp, nn.Dropout(0.4))
    run = _run(way | {"steps": 1, "model": model.train()})
    run.lr = lambda step: 0.0
    run.on_finish = lambda step: gradients.append(run.state.pushed.clone())
    for step in run.steps():
        for micro_batch in step:
            step.backward(run.model(**micro_batch.inputs)[1])
        repeated = step.update().repeated_tokens
    run.close()
    return gradients[0], repeated


def score_cut(per):
    """What this rank's groups say, cut as they are for lack of memory, and the groups."""
    run = _run(tight_options(2, brings=True))
    units = [unit for of_step in brought() for unit in of_step]
    own = [sum(units, ())] if run.world.is_first else units[:1]  # large, since forwards alone need less memory

    def values(output, micro_batch):
        of_slots = output[0][0][:, 0]
        return of_slots if per == "token" else micro_batch.per_sequence(of_slots)

    plans, plan_forwards = [], run.items.plan_forwards
    run.items.plan_forwards = lambda *given: plans.append(plan_forwards(*given)) or plans[-1]
    scores = run.score(own, values, per=per)
    run.close()
    return scores, own, len(plans[0].parts)


def refused_in_cut_steps():
    """What loops are told that make a loss of whole units where they are cut."""
    said = []
    for takes_units in (True, False):
        run = _run(tight_options(2))
        try:
            for step in run.steps():
                for micro_batch in step:
                    values = micro_batch.per_sequence(run.model(**micro_batch.inputs)[0][0][:, 0])
                    values = values[micro_batch.units] if takes_units else values
                    step.backward(values.mean(), mean_over="units")
        except LengthwiseError as error:
            said.append(str(error))
        run.close()
    return said
