"""TRL's GRPOTrainer samples, rewards and makes advantages; Lengthwise plans and computes the updates.

python examples/08_trl_grpo.py      or      torchrun --nproc-per-node 2 examples/08_trl_grpo.py
"""

import tempfile
from itertools import islice

import datasets
import trl
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed

import lengthwise as lw

words = ["<pad>", "<eos>", *map(str, range(20))]
words_tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}))
words_tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words_tokenizer, pad_token="<pad>", eos_token="<eos>")
set_seed(0)
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(vocab_size=len(words), eos_token_id=1, pad_token_id=0, bos_token_id=None, **sizes))
rows = [{"prompt": f"{number} 3"} for number in range(20) for _ in range(4)]
data = datasets.Dataset(datasets.table.InMemoryTable.from_pylist(rows), fingerprint="numbers")
lengths = {"num_generations": 8, "per_device_train_batch_size": 32, "max_completion_length": 12}
args = trl.GRPOConfig(tempfile.mkdtemp(), learning_rate=1e-2, use_cpu=True, report_to="none", bf16=False, **lengths)


def reward(completion_ids, **kwargs):  # even numbers are good ones
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]


trainer = trl.GRPOTrainer(model, reward, args=args, train_dataset=data, processing_class=tokenizer)


# In place of trainer.train():
def rows_of(batch):
    for prompt, is_prompt, answer, mask, advantage in zip(*(batch[name] for name in BATCH)):
        prompt, answer = prompt[is_prompt.bool()].tolist(), answer[mask.bool()].tolist()
        yield {"input_ids": prompt + answer, "mask": [0] * len(prompt) + [1] * len(answer), "advantage": advantage}


BATCH = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages")
examples = [{"input_ids": range(2, length), "mask": 1, "advantage": 0.0} for length in range(5, 20)]
run = lw.prepare(trainer.model, examples, loss_columns=("mask", "advantage"), lr=args.learning_rate)
for inputs in islice(trainer.get_train_dataloader(), 8):
    with run.plain():
        batch = trainer._generate_and_score_completions(inputs)
    step = run.step(rows_of(batch))
    for micro_batch in step:
        logits = run.model(**micro_batch.inputs).logits[0] / args.temperature
        logps = -F.cross_entropy(logits, micro_batch.labels, reduction="none")
        mask, advantage = (micro_batch.column(name, of="targets") for name in ("mask", "advantage"))
        ratio = (logps - logps.detach()).exp()  # one step a batch: this is the policy that sampled
        step.backward(-micro_batch.sum(ratio * advantage * mask) / step.total("mask"), mean_over="step")
    result = step.update()
    if run.world.is_first:
        print(f"reward {trainer._metrics['train']['reward'][-1]:.3f}, {result}")
