"""TRL's DPOTrainer sets up model, reference and data; Lengthwise trains, pairs packed and balanced over ranks.

python examples/07_trl_dpo.py      or      torchrun --nproc-per-node 2 examples/07_trl_dpo.py
"""

import tempfile

import datasets
import torch
import trl
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import lengthwise as lw

words = ["<pad>", "<eos>", *map(str, range(19)), "+", "=", "or"]
words_tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}))
words_tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words_tokenizer, pad_token="<pad>", eos_token="<eos>")
sums = [(f"{a} + {b} = ", str(a + b), " or ".join(map(str, range(1 + b)))) for a in range(9) for b in range(9)]
rows = [{"prompt": prompt, "chosen": right, "rejected": wrong} for prompt, right, wrong in sums]
torch.manual_seed(0)
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(vocab_size=len(words), **sizes))
args = trl.DPOConfig(tempfile.mkdtemp(), beta=0.5, learning_rate=3e-3, use_cpu=True, report_to="none", bf16=False)
data = datasets.Dataset(datasets.table.InMemoryTable.from_pylist(rows), fingerprint="sums")
reference = LlamaForCausalLM(model.config)
reference.load_state_dict(model.state_dict())
trainer = trl.DPOTrainer(model, reference, args=args, train_dataset=data, processing_class=tokenizer)


# In place of trainer.train():
def member(row, name):
    prompt, answer = row["prompt_ids"], row[name]
    return {"input_ids": prompt + answer, "completion_mask": [0] * len(prompt) + [1] * len(answer)}


def logps(model, micro_batch):
    logits = model(**micro_batch.inputs).logits[0]
    return -micro_batch.per_sequence(F.cross_entropy(logits, micro_batch.labels, reduction="none"))


def loss(gains):  # of all pairs of the step, [pairs, 2], whichever ranks computed them
    return -F.logsigmoid(args.beta * (gains[:, 0] - gains[:, 1])).mean()


pairs = [(member(row, "chosen_ids"), member(row, "rejected_ids")) for row in trainer.train_dataset]
options = {"sequences_per_step": 16, "epochs": 2, "lr": args.learning_rate}
run = lw.prepare(trainer.model, pairs, frozen=[trainer.ref_model], coupled_loss=loss, **options)
for step in run.steps():
    for micro_batch in step:
        step.couple(logps(run.model, micro_batch) - logps(trainer.ref_model, micro_batch))
    result = step.update()
    if run.world.is_first:
        print(f"step {step.number}: {result}")
run.close()
