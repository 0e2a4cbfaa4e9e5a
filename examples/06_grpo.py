"""GRPO: sampled rollouts, old and reference log-probabilities by run.score, clipped inner steps on any number of ranks.

python examples/06_grpo.py      or      torchrun --nproc-per-node 2 examples/06_grpo.py
"""

import numpy as np
import torch
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

import lengthwise as lw

END, GROUP, LONGEST, CLIP, BETA = 1, 8, 24, (0.8, 1.2), 0.02
COLUMNS = ("answer", "advantage", "old", "expected")
torch.manual_seed(0)
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(vocab_size=32, eos_token_id=END, pad_token_id=0, **sizes))
reference = LlamaForCausalLM(model.config)
reference.load_state_dict(model.state_dict())
examples = [{"input_ids": range(length), **dict.fromkeys(COLUMNS, 0.0)} for length in range(4, LONGEST + 1)]
run = lw.prepare(model, examples, frozen=[reference], loss_columns=COLUMNS, sequences_per_step=32, lr=1e-2)


def rollouts(prompt):
    """Rewards and items of a group of answers to a prompt; in earnest from an engine with today's weights."""
    with run.plain():
        rows = model.generate(torch.tensor([prompt] * GROUP), max_new_tokens=LONGEST - len(prompt), do_sample=True)
    answers = [row[len(prompt) :].tolist() for row in rows]
    answers = [row[: row.index(END) + 1] if END in row else row for row in answers]  # without padding
    rewards = np.array([np.mean(np.array(row) % 2 == 0) for row in answers])  # even tokens are good ones
    items = [{"input_ids": prompt + row, "answer": [0] * len(prompt) + [1] * len(row)} for row in answers]
    for row, advantage in zip(items, (rewards - rewards.mean()) / (rewards.std() + 1e-4)):
        row |= {"advantage": advantage, "old": 0.0, "expected": 0.0}
    return rewards, items


def logps_t(output, micro_batch):
    return -F.cross_entropy(output.logits[0], micro_batch.labels, reduction="none")


def both_logps_t(output, micro_batch):
    return torch.stack([logps_t(output, micro_batch), logps_t(reference(**micro_batch.inputs), micro_batch)], -1)


for iteration in range(8):
    torch.manual_seed(100 * iteration + run.world.rank)  # ranks sample different answers
    rewards, items = rollouts([2 + (iteration + 7 * run.world.rank) % 30, 3])
    for row, logps in zip(items, run.score(items, both_logps_t)):
        row["old"], row["expected"] = np.concatenate([np.zeros((1, 2)), logps[:-1]]).T  # each by the token it is of
    for step in run.steps([items] * 3):  # three inner steps
        for micro_batch in step:
            answer, advantage, old, expected = (micro_batch.column(name, of="targets") for name in COLUMNS)
            logps = logps_t(model(**micro_batch.inputs), micro_batch)
            ratio, gap = (logps - old).exp(), expected - logps
            gains_t = torch.minimum(ratio * advantage, ratio.clamp(*CLIP) * advantage) - BETA * (gap.exp() - gap - 1)
            step.backward(-micro_batch.sum(gains_t * answer) / step.total("answer"), mean_over="step")
        result = step.update()
    if run.world.is_first:
        print(f"iteration {iteration}: reward {rewards.mean():.3f}, {result}")
