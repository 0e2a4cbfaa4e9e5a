"""Small models of transformers in float64, and what their own loops would learn from items, one sequence at a time."""

import numpy as np
import torch
from torch.nn import functional as F

import lengthwise as lw
from tests.session import models

LR = 0.5
OPTIONS = {"memory_gib": 40, "sequences_per_step": 64, "steps": 1, "lr": LR, "optimizer": "sgd", "clip_norm": 0.0}
OPTIONS |= {"weight_decay": 0.0, "device": "cpu", "verbose": False, "policy": "dcp-intra", "check": False}
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}


def bert(kind: str = "BertForMaskedLM", **options):
    import transformers

    torch.manual_seed(0)
    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = transformers.BertConfig(vocab_size=models.VOCAB, max_position_embeddings=64, **SIZES, **none, **options)
    return getattr(transformers, kind)(config).double()


def gpt2(kind: str = "GPT2LMHeadModel", **options):
    import transformers

    torch.manual_seed(0)
    none = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    config = transformers.GPT2Config(
        vocab_size=models.VOCAB, n_embd=16, n_layer=2, n_head=2, n_positions=64, pad_token_id=0, **none, **options
    )
    return getattr(transformers, kind)(config).double()


def rows(count: int = 7, *, shortest: int = 3) -> list[np.ndarray]:
    rng = np.random.default_rng(1)
    return [rng.integers(1, models.VOCAB, int(length)) for length in rng.integers(shortest, 24, count)]


def learned(model, items, **options):
    """What one step of plain gradient descent over all items changes, by parameter."""
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    run = lw.prepare(model, items, **{"cost": models.mixed_cost(), **OPTIONS, **options})
    for step in run.steps():
        for micro_batch in step:
            step.backward(run.wrapped_model.loss_of(model(**micro_batch.inputs), micro_batch))
        step.update()
    run.close()
    return {name: (before[name] - value.detach()) / LR for name, value in model.named_parameters()}


def gradient(model, rows, targets, **columns):
    """The gradient of the mean loss over all targets, each row computed by itself; ``targets`` are not shifted."""
    count = sum(int((target != -100).sum()) for target in targets)
    model.zero_grad()
    for number, (row, target) in enumerate(zip(rows, targets)):
        inputs = {name: torch.as_tensor(np.asarray(values[number]))[None] for name, values in columns.items()}
        output = model(torch.as_tensor(np.asarray(row))[None], **inputs)
        logits = output.logits if hasattr(output, "logits") else output[0]
        target = torch.as_tensor(np.asarray(target))
        (F.cross_entropy(logits[0], target, ignore_index=-100, reduction="sum") / count).backward()
    found = {
        name: torch.zeros_like(value) if value.grad is None else value.grad.clone()
        for name, value in model.named_parameters()
    }
    model.zero_grad()
    return found


def following(labels):
    """What each token is to predict where the next one is: the label of that one."""
    return np.append(np.asarray(labels)[1:], -100)


def assert_equal(found, expected, tolerance: float = 1e-10):
    """Gradients by parameter; a loss of transformers in float32 needs a tolerance."""
    size = max(float(value.abs().max()) for value in expected.values())
    assert size > 1e-3, "there is something to learn"
    for name, value in expected.items():
        assert float((found[name] - value).abs().max()) <= tolerance * size, name


def learned_on_ranks(make, items, capacity=16):
    """The same on every rank, where two ranks share what is longer than ``capacity`` tokens."""
    from tests.session.loops import as_started_by_torchrun

    as_started_by_torchrun()
    cost = models.SimpleCost(capacity=capacity, loss=0.4, c_s=0.05)
    return learned(make(), items, cost=cost, memory_gib=capacity, recompute="none")
