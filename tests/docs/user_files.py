"""The files of a user that README and docs speak of, small."""

import json
from pathlib import Path

import numpy as np

from lengthwise.core.cost import ProfileRow, ProfileTable
from lengthwise.core.specs import model_preset

CHAT_TEMPLATE = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
TALK = ("How long is a coastline?", "It depends on the ruler.", "And a genome?", "Three billion letters. " * 3)


def write_chats(path: Path, *, count: int = 24) -> None:
    """Chats of different lengths, one a line."""
    numbers = np.random.default_rng(0)
    lines = []
    for _ in range(count):
        turns = 2 * int(numbers.geometric(0.5))
        messages = [{"role": ("user", "assistant")[k % 2], "content": TALK[k % 4]} for k in range(turns)]
        lines.append(json.dumps({"messages": messages}))
    path.write_text("\n".join(lines) + "\n")


def write_tokenizer(folder: Path) -> None:
    """A tokenizer of bytes with a chat template, as `from_pretrained` reads it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: k for k, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    wrapped.chat_template = CHAT_TEMPLATE
    wrapped.save_pretrained(folder)


def write_model(folder: Path) -> None:
    """A tiny Llama with its tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    write_tokenizer(folder)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=4096, **sizes)).save_pretrained(folder)


def write_profile(path: Path) -> None:
    """Measurements of llama-7b as an H100 might give them."""
    model = model_preset("llama-7b")
    rows = tuple(
        ProfileRow(lengths=(n,), time_s=0.01 + 1e-4 * n + 1e-9 * n * n, spread_s=0.0, kept_bytes=200_000 * n)
        for n in (512, 1024, 4096)
    )
    ProfileTable(
        model_digest=model.digest, model_name=model.name, device="NVIDIA H100 80GB HBM3", dtype="bfloat16",
        recompute=False, num_ranks=8, update_s=0.1, rows=rows,
    ).save(path)  # fmt: skip
