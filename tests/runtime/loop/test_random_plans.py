"""Random plans of any model give the gradients of its user's own loop, whatever they mix and whatever is trained."""

import random
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from lengthwise.core.pipeline_config import Method
from lengthwise.runtime.loop.planned_pipelines import ANY_MODEL_METHODS
from tests.runtime.loop.runs import EXACT, LENGTHS, Packs, in_double, plan_of, prepared, randomised, step_alone, train
from tests.runtime.loop.test_families import CASES, llama, modernbert
from tests.runtime.train.runs import local_world

NUM_SEQUENCES = len(LENGTHS)
METHODS = tuple(method for method in ANY_MODEL_METHODS if method is not Method.DENSE)


def _adapted(model, *modules):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    adapted = get_peft_model(model, LoraConfig(r=3, target_modules=list(modules)))
    return randomised(adapted, seed=1)  # B of LoRA is zero at first, and A would learn nothing


def llama_lora():
    """LoRA of the attention alone; nothing outside the layers is trained."""
    return _adapted(llama(), "q_proj", "v_proj")


def modernbert_lora():
    """LoRA of layers, and of the head."""
    return _adapted(modernbert(), "Wqkv", "decoder")


SWEPT = {
    **CASES,
    "llama_lora": replace(CASES["llama"], build=llama_lora),
    "modernbert_lora": replace(CASES["modernbert"], build=modernbert_lora),
}


def random_stages(rng, num_ranks, num_layers, most_stages):
    """Layers of each stage of a pipeline on so many ranks; none: one stage."""
    stages = rng.choice([n for n in range(1, min(num_layers, most_stages) + 1) if num_ranks % n == 0])
    cuts = sorted(rng.sample(range(1, num_layers), stages - 1))
    return tuple(b - a for a, b in pairwise((0, *cuts, num_layers))) if stages > 1 else ()


def random_groups(rng, num_ranks, num_layers, *, num_sequences=NUM_SEQUENCES, most_stages=9, shards=False):
    """Phases of disjoint pipelines of any shape with any number of packs each, of every sequence once.

    ``shards``: some pipelines shard gradients, where there is one phase.
    """
    ids = rng.sample(range(num_sequences), num_sequences)
    packs = []
    while ids:
        count = rng.randint(1, len(ids))
        packs.append(tuple(ids[:count]))
        ids = ids[count:]
    groups = []
    for phase in range(rng.randint(1, 2)):
        ranks = rng.sample(range(num_ranks), num_ranks)
        while ranks:
            size = rng.randint(1, len(ranks))
            groups.append((phase, tuple(ranks[:size]), []))
            ranks = ranks[size:]
    for pack in packs:
        rng.choice(groups)[2].append(pack)
    return tuple(
        Packs(
            ranks=ranks, packs=tuple(own), phase=phase, recompute=tuple(rng.choices([True, False], k=num_layers)),
            method=rng.choice(METHODS), stage_layers=random_stages(rng, len(ranks), num_layers, most_stages),
            shards_gradients=shards and not groups[-1][0] and random.Random(str(ranks)).random() < 0.7,
            keeps_attention=random.Random(str(packs)).random() < 0.5,
            head_groups=random.Random(str((packs, ranks))).choice((1, 1, 2, 3)),
        )
        for phase, ranks, own in groups
    )  # fmt: skip


def gradients_of_random_plans(name, seeds, expected, by_layer, compares_stages):
    """The largest error of this rank's share of the gradient, and of the loss, over a step of each seed's plan."""
    case, world, errors = SWEPT[name], local_world(), []
    with in_double():
        run = prepared(case, (), world, num_steps=len(seeds), by_layer=by_layer, compares_stages=compares_stages)
        run.lr, number = lambda step: 0.0, run.wrapped_model.structure.num_layers
        run.wrapped_model.layers.may_keep_attention = True
        run.planner = lambda batch: plan_of(
            batch, random_groups(random.Random(seeds[batch.step]), world.size, number, shards=not by_layer), number
        )
        run.keep_layers = lambda plan: seeds[plan.step] % (number + 1)
        own = torch.cat([
            expected[1][slot.name].flatten()[max(a, slot.start) - slot.start : max(0, b - slot.start)]
            for a, b in run.state.owned_layout.intervals[world.rank] for slot in run.state.table.slots.values()
        ])  # fmt: skip
        run.on_finish = lambda step: errors.append(
            max(abs(step.result.loss - expected[0]), float((run.state.pushed - own).abs().max()))
        )
        train(run)
        run.close()
    return errors


@pytest.mark.parametrize(
    ("name", "num_ranks", "by_layer", "num_plans"),
    [
        ("llama", 3, True, 2),
        ("modernbert_lora", 4, False, 1),
        *(
            pytest.param(name, ranks, by_layer, 200, marks=pytest.mark.deep)
            for name in SWEPT for ranks in (2, 3, 4) for by_layer in (False, True)
        ),
    ],
)  # fmt: skip
def test_random_plans_are_exact(ranks, name, num_ranks, by_layer, num_plans):
    loss, changes = step_alone(SWEPT[name])
    expected = loss, {parameter: -change for parameter, change in changes.items()}
    assert max(float(change.abs().max()) for change in changes.values()) > 1e-3
    for first in range(0, num_plans, 20):
        seeds = range(first, min(first + 20, num_plans))
        for errors in ranks(num_ranks).run(
            gradients_of_random_plans, name, seeds, expected, by_layer, compares_stages=num_plans > 20
        ):
            assert len(errors) == len(seeds) and max(errors) <= EXACT, max(zip(errors, seeds))
