"""A causal language model of transformers in a loop of one's own; lines with a mark are those that lengthwise adds.

python examples/04_transformers.py      or      torchrun --nproc-per-node 2 examples/04_transformers.py
"""

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

import lengthwise as lw  # +

torch.manual_seed(0)
config = Qwen3Config(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
)
model = Qwen3ForCausalLM(config)  # in earnest: AutoModelForCausalLM.from_pretrained(...)
numbers = np.random.default_rng(0)
sizes = np.minimum(numbers.geometric(0.04, 200) + 1, 128)
# In earnest: tokenizer(texts)["input_ids"]. Half of each row is a prompt, whose tokens have no loss.
items = [{"input_ids": np.cumsum(numbers.integers(1, 4, size)) % 96} for size in sizes]
for item in items:
    half = len(item["input_ids"]) // 2
    item["labels"] = np.where(np.arange(len(item["input_ids"])) < half, -100, item["input_ids"])

run = lw.prepare(model, items, policy="auto", lr=3e-3, sequences_per_step=32)  # +
for step in run.steps():  # +
    for micro_batch in step:  # +
        loss = model(**micro_batch.inputs).loss
        step.backward(loss)  # +
    done = step.update()  # +
    if run.world.is_first:
        degrees = sorted(pipeline.scheme.degree for pipeline in step.plan.pipelines)
        print(f"step {step.number}: loss {done.loss:.3f}, ranks that shared a pack: {degrees}")

with run.plain():  # +
    print(model.generate(torch.tensor([[3, 5, 7]]), max_new_tokens=5, do_sample=False).tolist())
