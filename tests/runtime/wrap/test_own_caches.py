"""Caches of keys and values that the configs of models inside a module ask for."""

import pytest
import transformers
from torch import nn

import lengthwise as lw
from lengthwise.runtime.wrap.hugging_face import OwnCaches
from tests.session import models


class WithValues(nn.Module):
    """A language model with a head of values, as reinforcement learning has it."""

    def __init__(self):
        super().__init__()
        sizes = {"vocab_size": models.VOCAB, "n_embd": 16, "n_layer": 3, "n_head": 2}
        off = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
        self.inner = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **off))
        self.values = nn.Linear(16, 1)

    def forward(self, idx, targets=None):
        output = self.inner(idx, output_hidden_states=True)
        loss = nn.functional.cross_entropy(output.logits[0], targets[0], ignore_index=-100)
        return loss + self.values(output.hidden_states[-1])[..., 0].square()[targets != -100].mean()


def test_a_module_around_a_model_of_transformers_is_computed_in_packs_without_its_cache():
    model = WithValues()
    config = model.inner.config
    assert config.use_cache
    run = lw.prepare(
        model, models.rows(), cost=models.mixed_cost(), memory_gib=40, steps=1, sequences_per_step=6, verbose=False,
        packing="always",
    )  # fmt: skip
    for step in run.steps():
        for micro_batch in step:
            step.backward(model(**micro_batch.inputs))
        assert step.update().loss > 0.0
    with run.plain():
        assert model.inner(micro_batch.tokens[None]).past_key_values is not None, "as before it was prepared"
    run.close()
    assert model.inner.config is config and config.use_cache


def test_what_configs_ask_for_is_restored_after_an_error():
    model = WithValues()
    other = transformers.GPT2Config(use_cache=False)
    model.inner.transformer.h[0].config = other
    caches = OwnCaches(model.inner)
    with pytest.raises(KeyError), caches.off():
        assert not model.inner.config.use_cache
        raise KeyError
    assert model.inner.config.use_cache and not other.use_cache
