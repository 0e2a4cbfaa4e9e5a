"""What is known without torch of a Hugging Face folder whose model transformers' own code computes, of any family."""

import hashlib
import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from lengthwise.core.batch import MASKED, NEXT_TOKEN
from lengthwise.core.errors import InputError
from lengthwise.core.read_file import brief
from lengthwise.core.specs import ModelSpec
from lengthwise.models.hf_config import read_config
from lengthwise.models.hf_sizes import read_priced_spec

_MASKED = "ForMaskedLM"
_ANY_VOCABULARY = 1 << 32
"""Where config.json does not say how many ids there are; preparing the model compares them."""


@dataclass(frozen=True, kw_only=True)
class StockModel:
    """A model in a Hugging Face folder, computed by its own class in transformers."""

    folder: Path
    architecture: str
    """Its class in transformers."""
    vocab_size: int
    mask_token_id: int | None
    spec: ModelSpec | None
    """Its sizes, to count FLOPs by; None where the family has no cost model."""
    digest: str
    """Sixteen hex digits over its configuration."""
    context_length: int = 0
    """Most tokens of a text that it was made for; 0: its configuration does not say."""
    max_positions: int = 0
    """0: preparing the model compares positions with the longest sequence."""

    @property
    def name(self) -> str:
        """The name of the folder."""
        return self.folder.resolve().name

    @property
    def objective(self) -> str:
        """What it is trained to predict: hidden tokens or the next one, by its class."""
        return objective_of_class(self.architecture)

    @property
    def causal(self) -> bool:
        """Whether it predicts the next token."""
        return self.objective == NEXT_TOKEN


def objective_of_class(architecture: str) -> str:
    """What a class of transformers predicts: hidden tokens or the next one."""
    return MASKED if architecture.endswith(_MASKED) else NEXT_TOKEN


def read_stock_model(folder: Path, *, mask_token_id: int | None = None) -> StockModel:
    """The model in ``folder``; ``mask_token_id``: where its configuration names none.

    Raises:
        InputError: its configuration is damaged, or does not say which class of transformers it is.
    """
    config = read_config(folder)
    names = config.get("architectures") or []
    if len(names) != 1:
        raise InputError(
            f"{folder / 'config.json'}: architectures = {brief(names)} does not say which class of transformers the "
            'model is; write one, such as ["Gemma2ForCausalLM"]'
        )
    spec = None
    with suppress(InputError):
        spec = read_priced_spec(folder)
    digest = hashlib.blake2b(json.dumps(config, sort_keys=True).encode(), digest_size=8)
    return StockModel(
        folder=folder,
        architecture=names[0],
        vocab_size=config.get("vocab_size", spec.vocab_size if spec else _ANY_VOCABULARY),
        mask_token_id=config.get("mask_token_id", mask_token_id),
        spec=spec,
        digest=digest.hexdigest(),
        context_length=config.get("max_position_embeddings", config.get("n_positions", 0)),
    )
