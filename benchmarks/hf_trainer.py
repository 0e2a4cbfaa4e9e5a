"""The peer of demo_policies.py, one rank under torchrun: transformers' Trainer with length grouping on the same corpus.

Same architecture and first weights do not matter for speed; same sizes, same sequences and the same number of ranks and
threads do. Prints one JSON object on rank 0: tokens trained (padding left out), seconds, padding share.

    torchrun --nproc-per-node 2 benchmarks/hf_trainer.py CONFIG STEPS BATCH_SIZE OUT
"""

import json
import os
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
from transformers.utils import logging

from lengthwise.config.run_config import load
from lengthwise.data.corpus import open_corpus
from lengthwise.runtime.models.targets import IGNORE
from lengthwise.session.planning import make_sampler
from lengthwise.session.trained_model import resolve_model


class Sequences(Dataset):
    """The sequences of the first steps of the run, in sampler order."""

    def __init__(self, config, steps):
        self.corpus = open_corpus(config.data)
        sampler = make_sampler(config, self.corpus)
        self.ids = [sequence for _ in range(steps) for sequence in next(sampler).ids]
        self.lengths = [int(self.corpus.lengths.lengths[sequence]) for sequence in self.ids]

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, position):
        tokens = torch.from_numpy(self.corpus.tokens(self.ids[position]).astype("int64"))
        return {"input_ids": tokens, "length": len(tokens)}


def pad(rows):
    """Pad to the longest of the micro-batch, as transformers' collators do."""
    longest = max(len(row["input_ids"]) for row in rows)
    tokens = torch.zeros(len(rows), longest, dtype=torch.int64)
    labels = torch.full((len(rows), longest), IGNORE)
    mask = torch.zeros(len(rows), longest, dtype=torch.int64)
    for i, row in enumerate(rows):
        n = len(row["input_ids"])
        tokens[i, :n] = labels[i, :n] = row["input_ids"]
        mask[i, :n] = 1
    COMPUTED.append(tokens.numel())
    return {"input_ids": tokens, "labels": labels, "attention_mask": mask}


COMPUTED = []


class Clock(TrainerCallback):
    """Seconds from the end of the first optimizer step to the end of the last: warm-up left out."""

    def __init__(self):
        self.ends = []

    def on_step_end(self, args, state, control, **others):
        self.ends.append(time.perf_counter())


def main():
    config_path, steps, batch_size, out = sys.argv[1:]
    logging.set_verbosity_error()
    config = load(Path(config_path), [])
    data = Sequences(config, int(steps))
    spec = resolve_model(config, data.corpus)
    torch.manual_seed(config.seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=spec.vocab_size,
            hidden_size=spec.hidden_size,
            intermediate_size=spec.ffn_size,
            num_hidden_layers=spec.num_layers,
            num_attention_heads=spec.num_heads,
            num_key_value_heads=spec.num_kv_heads,
            head_dim=spec.head_size,
            tie_word_embeddings=spec.tied_embeddings,
            max_position_embeddings=config.data.max_length,
            use_cache=False,
            attn_implementation="sdpa",
        )
    )
    clock = Clock()
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=int(batch_size),
        num_train_epochs=1,
        train_sampling_strategy="group_by_length",
        length_column_name="length",
        learning_rate=config.optim.lr,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        remove_unused_columns=False,
        dataloader_num_workers=0,
        ddp_find_unused_parameters=False,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=data, data_collator=pad, callbacks=[clock])
    trainer.train()
    if os.environ.get("RANK", "0") == "0":
        share = (len(clock.ends) - 1) / len(clock.ends)  # of the steps, and so about of the tokens, that were timed
        computed = sum(COMPUTED) * int(os.environ.get("WORLD_SIZE", "1"))
        document = {
            "tokens": sum(data.lengths) * share,
            "seconds": clock.ends[-1] - clock.ends[0],
            "padding": 1 - sum(data.lengths) / computed,
        }
        Path(out).write_text(json.dumps(document))
    torch.distributed.destroy_process_group()  # else a thread of Gloo may abort the process on its way out


if __name__ == "__main__":
    main()
