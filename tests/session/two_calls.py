"""Loops that call a model with dropout twice in a micro-batch, such as R-Drop and SimCSE do."""

from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

import lengthwise as lw
from lengthwise.core.batch import NEXT_TOKEN
from tests.runtime.loop.runs import in_double
from tests.session.loops import as_started_by_torchrun, weights_of
from tests.session.models import VOCAB
from tests.session.structure_runs import OPTIONS, plan_of, rows
from tests.session.structures import WIDTH, Plain


class Dropping(Plain):
    """Dropout of hidden numbers in every layer."""

    def layer(self):
        block = super().layer()
        block.mlp = nn.Sequential(block.mlp, nn.Dropout(0.3))
        return block


class RandomSlopes(Plain):
    def layer(self):
        block = super().layer()
        block.mlp[1] = nn.RReLU()
        return block


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": VOCAB, "hidden_size": WIDTH, "intermediate_size": 24, "num_hidden_layers": 3}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, attention_dropout=0.3))


MODELS = {"dropout": Dropping, "slopes": RandomSlopes, "attention dropout": llama}


def train_twice(name, settings):
    """For each kind of plan, with its options: how far the calls lie apart, and the weights after a step."""
    as_started_by_torchrun()
    with in_double():
        return [_train_twice(name, kind, options) for kind, options in settings]


def _train_twice(name, kind, options):
    torch.manual_seed(0)
    model = MODELS[name]().double().train()
    run = lw.prepare(model, rows(), steps=1, objective=NEXT_TOKEN, **OPTIONS | options)
    recomputes = options.get("recompute") != "none"
    run.planner = partial(plan_of, kind, run.wrapped_model.structure.num_layers, run.world.size, recomputes)
    apart = []
    for step in run.steps():
        for micro_batch in step:
            outputs = [model(**micro_batch.inputs) for _ in range(2)]
            first, second = (_read(output)[0][0] for output in outputs)
            apart.append(float((first - second).detach().abs().max()))
            p, q = first.log_softmax(-1), second.log_softmax(-1)
            divergence = F.kl_div(p, q, reduction="none", log_target=True).sum(-1)
            step.backward(_read(outputs[0])[1], side=micro_batch.mean(divergence, over="tokens"))
        step.update()
    run.close()
    return min(apart, default=None), weights_of(model)


def _read(output):
    """Logits and loss."""
    return output if isinstance(output, tuple) else (output.logits, output.loss)
