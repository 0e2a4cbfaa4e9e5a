"""The schema of index.json: every value that the program reads of it, checked when an index is opened."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from lengthwise.core.lengths import MOST_TOKENS
from lengthwise.core.read_file import brief

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja"
)  # fmt: skip
"""Files of a tokenizer of Hugging Face; an index has those that it was made with."""
FILE_NAMES = ("tokens.bin", "loss_mask.bin", "offsets.npy", "lengths.npy", "documents.jsonl", *TOKENIZER_FILES)
"""Every file beside index.json that an index may have."""
_REQUIRED = ("offsets.npy", "lengths.npy")
MAX_COUNT = 1 << 62
MAX_VOCABULARY = 1 << 32
_STRICT = ConfigDict(strict=True, extra="allow")

Count = Annotated[int, Field(ge=0, le=MAX_COUNT)]
TokenId = Annotated[int, Field(ge=0, lt=MAX_VOCABULARY)]
Hex16 = Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]


class _Intake(BaseModel):
    """Documents read and left out; see ``data.intake``."""

    model_config = _STRICT

    documents: Count
    empty: Count
    binary: Count
    undecodable: Count
    unreadable: Count
    examples: dict[str, Annotated[list[str], Field(min_length=1)]]

    @model_validator(mode="after")
    def _check_examples(self) -> "_Intake":
        for reason in ("empty", "binary", "undecodable", "unreadable"):
            if getattr(self, reason) and reason not in self.examples:
                raise ValueError(f"examples has no {reason!r}, and {reason} is {getattr(self, reason)}")
        return self


class _Tokenizer(BaseModel):
    """How text became tokens; see ``data.tokenizer``."""

    model_config = _STRICT

    kind: str
    path: str


class IndexInfo(BaseModel):
    """The content of index.json."""

    model_config = _STRICT

    schema_version: int
    num_sequences: Annotated[int, Field(ge=1, le=MAX_COUNT)]
    num_tokens: Annotated[int, Field(ge=1, le=MAX_COUNT)]
    max_length: Annotated[int, Field(ge=1, le=MOST_TOKENS)]
    has_tokens: bool
    vocab_size: Annotated[int, Field(ge=1, le=MAX_VOCABULARY)] | None
    dtype: Literal["uint8", "uint16", "uint32"] | None
    eos_id: TokenId | None
    tokenizer: _Tokenizer
    digest: Hex16
    corpus_digest: Annotated[str, Field(max_length=200, pattern=r"^[0-9a-f]*$")]
    ledger: _Intake
    files: dict[Literal[FILE_NAMES], Count]  # type: ignore[valid-type]
    num_loss_tokens: Annotated[int, Field(ge=1, le=MAX_COUNT)] | None = None
    request: dict[str, Any]
    fingerprint: str

    @model_validator(mode="after")
    def _check_together(self) -> "IndexInfo":
        """Refuse values that contradict one another."""
        needed = (*_REQUIRED, "tokens.bin") if self.has_tokens else _REQUIRED
        if missing := [name for name in needed if name not in self.files]:
            raise ValueError(f"files has no {missing[0]}")
        mask_bytes = self.files.get("loss_mask.bin")
        if mask_bytes not in (None, self.num_tokens) or (mask_bytes is None) != (self.num_loss_tokens is None):
            raise ValueError(
                f"loss_mask.bin has {mask_bytes} bytes, but there are {self.num_tokens:,} tokens, of which "
                f"{self.num_loss_tokens} have a loss"
            )
        if not self.has_tokens:
            return self
        if self.vocab_size is None or self.dtype is None or not self.corpus_digest:
            raise ValueError("has_tokens is true, but vocab_size, dtype or corpus_digest is not given")
        item_bytes = {"uint8": 1, "uint16": 2, "uint32": 4}[self.dtype]
        if self.vocab_size > 1 << 8 * item_bytes:
            raise ValueError(f"vocab_size is {self.vocab_size:,}, more than tokens of {self.dtype} can tell apart")
        if self.eos_id is not None and self.eos_id >= self.vocab_size:
            raise ValueError(f"eos_id is {self.eos_id:,}, vocab_size {self.vocab_size:,}")
        if self.files["tokens.bin"] != self.num_tokens * item_bytes:
            raise ValueError(
                f"tokens.bin has {self.files['tokens.bin']:,} bytes, but {self.num_tokens:,} tokens of {self.dtype} "
                f"take {self.num_tokens * item_bytes:,}"
            )
        return self


def check_info(document: Any) -> None:
    """Raise ``ValueError`` naming the first wrong value of index.json."""
    try:
        IndexInfo.model_validate(document)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(brief(str(part))[1:-1] for part in first["loc"])
        message = first["msg"].removeprefix("Value error, ")
        value = "" if first["type"] in ("missing", "value_error") else f", not {brief(first['input'])}"
        raise ValueError(f"{key + ': ' if key else ''}{message[0].lower()}{message[1:]}{value}") from None
