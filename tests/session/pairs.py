"""Preference pairs and triplets, losses that couple their sequences, and the loops that users have for them."""

import numpy as np
import torch
from torch.nn import functional as F

import lengthwise as lw
from lengthwise.config.optimizer_settings import OptimizerSettings
from tests.session import models
from tests.session.loops import as_started_by_torchrun, weights_of

BETA, LR, STEPS, UNITS_A_STEP = 0.3, 0.2, 3, 7
SGD = {
    "optimizer": OptimizerSettings(name="sgd", momentum=0.0, weight_decay=0.0), "lr": LR, "clip_norm": 0.0
}  # fmt: skip
"""Weights after a step are weights before it less the gradient: what is compared is every gradient."""


def pairs(count=12, *, seed=0, longest=28):
    """Chosen and rejected answers of ragged lengths, some of one token; the prompt has no loss."""
    rng = np.random.default_rng(seed)

    def member(length=None):
        length = length or min(longest, int(rng.geometric(0.12)))
        tokens = rng.integers(0, models.VOCAB, length)
        return {"input_ids": tokens, "labels": np.where(np.arange(length) < length // 3, -100, tokens)}

    found = [(member(), member()) for _ in range(count)]
    found[1], found[5], found[9] = (member(26), member(24)), (member(25), member(3)), (member(1), member(27))
    found[3][0].update(input_ids=np.array([7]), labels=np.array([7]))
    return found


def triplets(count=12):
    """Anchor, positive and negative without labels, as a list of three."""
    return [
        [{"input_ids": row} for row in models.rows(3, longest=12, seed=number)] for number in range(100, 100 + count)
    ]


def reference():
    return models.gpt(seed=9)


def preference(gains):
    """The loss of each unit, from [u, 2] what chosen and rejected gained in log-probability."""
    chosen, rejected = gains.unbind(1)
    return -F.logsigmoid(BETA * (chosen - rejected))


def contrast(embedded):
    """The loss of each unit, from [u, 3, D] embeddings."""
    anchor, positive, negative = embedded.unbind(1)
    near, far = F.cosine_similarity(anchor, positive), F.cosine_similarity(anchor, negative)
    return -F.logsigmoid(5 * (near - far))


def log_probability(model, member):
    """Of the labels of one sequence by itself, in a plain loop."""
    tokens, labels = (torch.as_tensor(member[name]) for name in ("input_ids", "labels"))
    logits = model(tokens[None])[0][0, :-1]
    return -F.cross_entropy(logits, labels[1:], reduction="sum", ignore_index=-100)


def dpo_alone(model, frozen, unit):
    """The loss of one pair in a plain loop."""
    with torch.no_grad():
        expected = torch.stack([log_probability(frozen, member) for member in unit])
    return preference((torch.stack([log_probability(model, member) for member in unit]) - expected)[None])[0]


def contrast_alone(model, unit):
    """The loss of one triplet in a plain loop, of logits of last tokens."""
    embedded = [model(torch.as_tensor(member["input_ids"])[None])[0][0, -1] for member in unit]
    return contrast(torch.stack(embedded)[None])[0]


def train_plainly(loss_of_step, batches):
    """Losses and weights of a loop on one device, without packing; ``loss_of_step(model, ids)``."""
    model, losses = models.gpt(), []
    for ids in batches:
        loss = loss_of_step(model, ids)
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= LR * parameter.grad
                parameter.grad = None
        losses.append(float(loss.detach()))
    return losses, weights_of(model)


def log_probabilities(model, micro_batch):
    """[s] of the labels of each sequence."""
    logits = model(**micro_batch.inputs)[0][0]
    return -micro_batch.per_sequence(F.cross_entropy(logits, micro_batch.labels, reduction="none", ignore_index=-100))


def prepared(items, *, model=None, **options):
    as_started_by_torchrun()
    options = (
        {"cost": models.mixed_cost(), "memory_gib": 40, "seed": 3, "check": False, "policy": "dcp-intra"}
        | SGD
        | options
    )
    return lw.prepare(models.gpt() if model is None else model, items, verbose=False, **options)


def learn_preferences(run, frozen, way="units"):
    """Losses, degrees and ids of units of the steps that are left."""
    losses, degrees, units = [], set(), []
    for step in run.steps():
        for micro_batch in step:
            with torch.no_grad():
                expected = log_probabilities(frozen, micro_batch)
            gains = log_probabilities(run.model, micro_batch) - expected
            counted = micro_batch.per_sequence(torch.ones(micro_batch.shard.num_slots, 1))
            assert counted.flatten().tolist() == list(micro_batch.pack.lengths), "padding belongs to no sequence"
            assert gains.shape == (len(micro_batch.pack.ids),)
            members = torch.tensor(micro_batch.pack.ids)[micro_batch.units] % 2
            assert (members == torch.tensor([0, 1])).all(), "a unit's members are there, in order"
            unit_losses = preference(gains[micro_batch.units])
            if way == "units":
                step.backward(unit_losses.mean(), mean_over="units")
            else:
                step.backward(micro_batch.mean(unit_losses, over="units"), mean_over="step")
        losses.append(step.update().loss)
        held = [p for p in step.plan.pipelines if p.micro_batches]
        degrees |= {pipeline.scheme.degree for pipeline in held}
        units.append(sorted(i for pipeline in held for m in pipeline.micro_batches for i in m.pack.ids))
    return losses, degrees, units


def train_dpo(settings):
    """Losses, degrees, units and weights, one after the other for each of the settings."""
    found = []
    for options in settings:
        frozen, way = reference(), options.get("way", "units")
        options = {name: value for name, value in options.items() if name != "way"}
        run = prepared(pairs(), frozen=[frozen], **{"sequences_per_step": UNITS_A_STEP, "steps": STEPS} | options)
        result = learn_preferences(run, frozen, way)
        run.close()
        found.append((*result, weights_of(run.model)))
    return found


def train_dpo_in_parts(folder, *, first, last):
    """Losses and weights of a run that goes on from a checkpoint, of any number of ranks."""
    frozen = reference()
    run = prepared(
        pairs(), model=models.gpt(seed=0 if first else 7), frozen=[frozen], steps=last, sequences_per_step=UNITS_A_STEP
    )
    if not first:
        run.resume(folder)
    losses, *_ = learn_preferences(run, frozen)
    run.save(folder)
    run.close()
    return losses, weights_of(run.model)


def train_contrast(settings):
    """Losses, degrees and weights of a loss over triplets beside that of next tokens."""
    found = []
    for options in settings:
        run = prepared(triplets(), sequences_per_step=5, steps=STEPS, **options)
        losses, degrees = [], set()
        for step in run.steps():
            for micro_batch in step:
                logits, loss = run.model(**micro_batch.inputs)
                last = torch.where(micro_batch.is_last[:, None], logits[0], 0.0)
                embedded = micro_batch.per_sequence(last)[micro_batch.units]
                step.backward(loss, side=0.5 * micro_batch.mean(contrast(embedded), over="units"))
            losses.append(step.update().loss)
            degrees |= {p.scheme.degree for p in step.plan.pipelines if p.micro_batches}
        run.close()
        found.append((losses, degrees, weights_of(run.model)))
    return found


def contrast_plainly(batches):
    """The same on one device."""
    items = triplets()

    def loss_of_step(model, ids):
        rows = [member["input_ids"] for i in ids for member in items[i]]
        of_tokens = sum(models.sum_of_losses(model, row) for row in rows) / sum(len(row) - 1 for row in rows)
        return of_tokens + 0.5 * torch.stack([contrast_alone(model, items[i]) for i in ids]).mean()

    return train_plainly(loss_of_step, batches)


class Slow:
    """A dataset of pairs that processes read; one of its members cannot be read again where that is said."""

    def __init__(self, fails=None):
        self.items, self.fails, self.reads = pairs(), fails, 0

    def __len__(self):
        return len(self.items)

    def __getitem__(self, number):
        self.reads += number == self.fails
        if self.reads > 1 + (number in (0, len(self) - 1)):
            raise OSError("the disk is gone")
        return self.items[number]


def train_llama_on_pairs(policy):
    """Losses and weights of a model of transformers, whose labels are shifted inside, and of the plain loop."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=models.VOCAB, num_key_value_heads=2, **sizes)).double()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    run = prepared(pairs(), model=model, policy=policy, sequences_per_step=12, steps=1, check=True)
    for step in run.steps():
        for micro_batch in step:
            logits = model(**micro_batch.inputs).logits[0]
            sums = -micro_batch.per_sequence(F.cross_entropy(logits, micro_batch.labels, reduction="none"))
            step.backward(preference(sums[micro_batch.units]).mean(), mean_over="units")
        loss = step.update().loss
    run.close()
    weights = weights_of(model)
    model.load_state_dict(state)
    sums = [
        torch.stack([log_probability(lambda tokens: (model(tokens).logits,), member) for member in unit])
        for unit in pairs()
    ]
    expected = preference(torch.stack(sums)).mean()
    expected.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= LR * parameter.grad
    return loss, float(expected.detach()), weights, weights_of(model)
