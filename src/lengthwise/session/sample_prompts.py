"""The samples of text of a configured run: its prompts, as tokens of the tokenizer that it learns from."""

from pathlib import Path
from typing import TYPE_CHECKING

from lengthwise.config.run_config import Config
from lengthwise.core.errors import InputError
from lengthwise.core.lengths import MOST_TOKENS
from lengthwise.core.read_file import brief
from lengthwise.core.specs import ModelSpec
from lengthwise.data.corpus import Corpus
from lengthwise.index.tokenizers import Tokenizer, TokenizerSpec, load_tokenizer
from lengthwise.models.stock_model import StockModel

if TYPE_CHECKING:
    from lengthwise.runtime.train.text_samples import TextSampling

_FILE = "tokenizer.json"


def text_sampling(config: Config, corpus: Corpus, spec: ModelSpec | StockModel) -> "TextSampling | None":
    """How the run samples text; None if it does not.

    Raises:
        InputError: the model predicts no next token, no tokenizer is known, or a prompt has no tokens or too many.
    """
    train = config.train
    if not train.sample_every:
        return None
    if not spec.causal:
        raise InputError(
            f"model {spec.name} predicts hidden tokens, so it continues no text; leave out train.sample_every"
        )
    from lengthwise.runtime.train.text_samples import TextSampling

    tokenizer = _tokenizer(config, corpus)
    prompts = [(text, tuple(tokenizer.encode_prompt(text))) for text in train.sample_prompts]
    max_length = spec.max_positions if isinstance(spec, ModelSpec) else spec.context_length
    longest = (max_length or MOST_TOKENS) - 1
    for text, tokens in prompts:
        if not tokens:
            raise InputError(f"train.sample_prompts: {brief(text)} has no tokens; a prompt has at least 1")
        if not 0 < len(tokens) <= longest or max(tokens) >= spec.vocab_size:
            raise InputError(
                f"train.sample_prompts: {brief(text)} has {len(tokens):,} tokens; a prompt has 1 to {longest:,}, of "
                f"the {spec.vocab_size:,} ids that model {spec.name} embeds"
            )
    return TextSampling(
        prompts=prompts,
        decode=tokenizer.decode,
        vocab_size=min(tokenizer.vocab_size, spec.vocab_size),
        eos_id=tokenizer.eos_id,
        every=train.sample_every,
        max_tokens=train.sample_tokens,
        temperature=train.sample_temperature,
        seed=config.seed,
        max_length=max_length,
    )


def _tokenizer(config: Config, corpus: Corpus) -> Tokenizer:
    """The tokenizer that an index was made with, or that of ``model.hf``.

    Raises:
        InputError: there is none.
    """
    for part in corpus.parts:
        settings = part.store.info["tokenizer"]
        path = str(part.store.path / _FILE) if settings["path"] else ""
        spec = TokenizerSpec(kind=settings["kind"], path=path, eos_token=settings.get("eos_token", ""))
        if spec.encodes:
            return load_tokenizer(spec)
    file = Path(config.model.hf) / _FILE
    if config.model.hf and file.is_file():
        return load_tokenizer(TokenizerSpec(kind="huggingface", path=str(file)))
    raise InputError(
        "train.sample_prompts are text and no tokenizer is known, since the index was made of token ids; name a "
        f"model.hf that has a {_FILE}, index the text itself, or leave out train.sample_every"
    )
