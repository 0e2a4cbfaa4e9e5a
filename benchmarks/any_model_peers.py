"""How the benchmark of any model trains its Llama without us: padded batches of like lengths, four to a rank.

transformers' Trainer under DistributedDataParallel, trl's SFTTrainer with its default loss (chunked over tokens), and a
loop over layers sharded by torch's FSDP2 (accelerate shards on GPUs alone). All group by length as the Trainer does.
"""

import sys
import tempfile
from typing import Any

import numpy as np
import torch
from any_model_runs import VOCABULARY, make_llama, prepared
from hf_trainer import COMPUTED, Clock, pad

PER_RANK = 4
"""Sequences of a batch."""
Rows = list[dict[str, Any]]


def rows_of(drawn: str, steps: int) -> Rows:
    """The sequences of our steps, and of one before that is not timed."""
    run = prepared("llama (transformers)", drawn, "static", tempfile.gettempdir(), steps=steps + 1)
    ids = [sequence for _ in range(steps + 1) for sequence in next(run.stream).ids]
    data = [torch.from_numpy(np.asarray(run.collator.source.tokens(i)).astype("int64")) for i in ids]
    run.close()
    return [{"input_ids": tokens, "length": len(tokens)} for tokens in data]


def arguments() -> dict[str, Any]:
    """What transformers' and trl's trainers are told alike."""
    return {
        "output_dir": tempfile.mkdtemp(), "per_device_train_batch_size": PER_RANK, "num_train_epochs": 1,
        "train_sampling_strategy": "group_by_length", "length_column_name": "length", "use_cpu": True, "report_to": [],
        "save_strategy": "no", "logging_strategy": "no", "disable_tqdm": True, "ddp_find_unused_parameters": False,
    }  # fmt: skip


def speed(rows: Rows, clock: Clock) -> dict[str, float]:
    """Tokens per second of all steps but the first, padding left out."""
    share = (len(clock.ends) - 1) / len(clock.ends)
    return {"tokens_per_s": sum(row["length"] for row in rows) * share / (clock.ends[-1] - clock.ends[0])}


def train_with_trainer(drawn: str, steps: int) -> dict[str, float]:
    """The same sequences with transformers' own Trainer."""
    from transformers import Trainer, TrainingArguments
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    COMPUTED.clear()
    rows, clock = rows_of(drawn, steps), Clock()
    torch.manual_seed(0)
    Trainer(
        model=make_llama(), args=TrainingArguments(**arguments(), remove_unused_columns=False), train_dataset=rows,
        data_collator=pad, callbacks=[clock],
    ).train()  # fmt: skip
    return speed(rows, clock)


def train_with_trl(drawn: str, steps: int, folder: str) -> dict[str, float]:
    """The same sequences with trl's SFTTrainer, installed in ``folder``; nothing is recomputed."""
    if folder not in sys.path:
        sys.path.append(folder)
    from datasets import Dataset, disable_progress_bars
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast
    from transformers.utils import logging as transformers_logging
    from trl import SFTConfig, SFTTrainer

    transformers_logging.set_verbosity_error()
    disable_progress_bars()
    rows, clock = rows_of(drawn, steps), Clock()
    words = WordLevel({str(i): i for i in range(VOCABULARY)}, unk_token="0")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), eos_token="1", pad_token="0")
    torch.manual_seed(0)
    SFTTrainer(
        model=make_llama(), processing_class=tokenizer, callbacks=[clock],
        args=SFTConfig(**arguments(), bf16=False, gradient_checkpointing=False, max_length=None),
        train_dataset=Dataset.from_list([{**row, "input_ids": row["input_ids"].tolist()} for row in rows]),
    ).train()  # fmt: skip
    return speed(rows, clock)


def train_with_fsdp2(drawn: str, steps: int) -> dict[str, float]:
    """The same sequences, with each layer and the rest sharded by FSDP2 over all ranks."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from transformers.trainer_pt_utils import DistributedLengthGroupedSampler

    rows, clock = rows_of(drawn, steps), Clock()
    torch.manual_seed(0)
    model, mesh = make_llama(), init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    sampler = DistributedLengthGroupedSampler(PER_RANK * dist.get_world_size(), lengths=[row["length"] for row in rows])
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5)
    for batch in torch.utils.data.DataLoader(rows, batch_size=PER_RANK, sampler=sampler, collate_fn=pad):
        model(**batch, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        clock.on_step_end(None, None, None)
    return speed(rows, clock)
