"""Units with different numbers of members, a loss over each, and the same in a plain loop."""

import torch

from tests.session.branches import COLUMNS, GROUPS_A_STEP, groups, token_logps
from tests.session.loops import weights_of
from tests.session.pairs import log_probability, prepared, train_plainly

SIZES = (3, 1, 5, 2)
STEPS = 2


def ragged(count=8, *, seed=0):
    """Units of 3, 1, 5 and 2 members in turn, most of which begin with the same tokens."""
    whole, more = groups(count, seed=seed), groups(count, seed=seed + 50)
    return [(*unit, *others)[: SIZES[k % len(SIZES)]] for k, (unit, others) in enumerate(zip(whole, more))]


def variances(values, unit_ids):
    """[u] the variance in each unit of values [s]."""
    sizes = unit_ids.bincount()
    zeros = torch.zeros(len(sizes), dtype=torch.float64)
    means = zeros.index_add(0, unit_ids, values.double()) / sizes
    return zeros.index_add(0, unit_ids, (values - means[unit_ids]).square()) / sizes + means.sin()


def batch_loss(values, unit_ids):
    """A loss of all sequences of a step that no sum over units makes."""
    return variances(values, unit_ids).mean() / 10 + values.logsumexp(0)


def loss_alone(model, units, is_coupled):
    values = torch.stack([log_probability(model, member) for unit in units for member in unit])
    unit_ids = torch.repeat_interleave(torch.arange(len(units)), torch.tensor([len(unit) for unit in units]))
    return batch_loss(values, unit_ids) if is_coupled else variances(values, unit_ids).mean() / 10


def train_alone(is_coupled, batches):
    return train_plainly(lambda model, units: loss_alone(model, units, is_coupled), batches)


def brought():
    return [ragged(5 + step, seed=7 + step) for step in range(STEPS)]


def values_of(output, micro_batch):
    return micro_batch.per_sequence(token_logps(output[0][0], micro_batch.labels))


def train(ways):
    """By way: losses, degrees, weights and whether members of a unit were on different ranks; and scores at its end."""
    found = []
    for way in ways:
        is_coupled, via = way["coupled"], way["via"]
        options = {name: value for name, value in way.items() if name not in ("coupled", "via")}
        run = prepared(
            ragged(), coupled_loss=batch_loss if is_coupled else None, loss_columns=COLUMNS, step_max_length=150,
            **{"sequences_per_step": GROUPS_A_STEP, "steps": STEPS} | options,
        )  # fmt: skip
        own = [units[run.world.rank :: run.world.size] for units in brought()]
        scores = run.score(own[0], values_of, per="sequence") if via == "step" else []
        losses, degrees, is_apart = [], set(), False
        for step in run.steps() if via == "corpus" else map(run.step, own):
            for micro_batch in step:
                values = values_of(run.model(**micro_batch.inputs), micro_batch)
                if is_coupled:
                    step.couple(values)
                else:
                    by_unit = variances(values, micro_batch.unit_ids)
                    assert len(by_unit) == micro_batch.num_units
                    step.backward(by_unit.mean() / 10, mean_over="units")
            losses.append(step.update().loss)
            pipelines = [pipeline for pipeline in step.plan.pipelines if pipeline.micro_batches]
            degrees |= {pipeline.scheme.degree for pipeline in pipelines}
            ranks_of = {i: p.ranks for p in pipelines for m in p.micro_batches for i in m.pack.ids}
            is_apart = is_apart or (is_coupled and len(set(ranks_of.values())) > 1)
        run.close()
        found.append((losses, degrees, is_apart, weights_of(run.model), list(zip(scores, own[0]))))
    return found


def refused():
    """What a rank is told of units whose numbers of members a loop does not take, and the loss of a step after it."""
    options = {"sequences_per_step": 2, "step_max_length": 150, "loss_columns": COLUMNS}
    run, said = prepared(ragged()[:1] * 4, **options), []
    for units in (ragged()[:1] * 2, ragged()[:2], ragged()[:1] * 2, [ragged()[0][0]]):
        try:
            step = run.step(units if run.world.is_first else [])
            for micro_batch in step:
                values = values_of(run.model(**micro_batch.inputs), micro_batch)
                step.backward(values[micro_batch.units].square().mean(1).mean(), mean_over="units")
            said.append(step.update().loss)
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
    run.close()
    run = prepared(ragged()[:1] * 4, coupled_loss=lambda gains: gains.sum(), **options)
    try:
        step = run.step(ragged()[run.world.rank :: run.world.size])
        for micro_batch in step:
            step.couple(values_of(run.model(**micro_batch.inputs), micro_batch))
        step.update()
    except Exception as error:
        said.append(f"{type(error).__name__}: {error}")
    run.close()
    return said
