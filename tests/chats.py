"""A tiny chat model as a Hugging Face folder: ChatML with special tokens, a template and a generation config."""

from pathlib import Path

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<pad>")
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}<|im_end|>{% endgeneration %}\n"
    "{% else %}{{ message['content'] }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_tokenizer(folder: Path, *, template: str = TEMPLATE) -> None:
    """A byte-level tokenizer with special tokens and a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<pad>")
    wrapped.chat_template = template or None
    wrapped.save_pretrained(folder)


def write_model(folder: Path) -> None:
    """A tiny Llama beside its tokenizer."""
    import torch
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    ids = {"bos_token_id": 256, "eos_token_id": [258, 256], "pad_token_id": 259}
    config = LlamaConfig(vocab_size=260, max_position_embeddings=4096, dtype="bfloat16", **sizes, **ids)
    model = LlamaForCausalLM(config).bfloat16()
    model.generation_config = GenerationConfig(**ids, do_sample=True, temperature=0.6)
    model.save_pretrained(folder)
    write_tokenizer(folder)
