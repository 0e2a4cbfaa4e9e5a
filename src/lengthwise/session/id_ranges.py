"""How many tokens a model's embedding has, and how many classes its loss: seen in a forward, checked on the corpus."""

from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from lengthwise.core.batch import NEXT_TOKEN
from lengthwise.core.errors import InputError
from lengthwise.runtime.loop.prepared_model import PreparedModel
from lengthwise.runtime.wrap.model_accessors import input_embeddings


class IdRanges(TorchFunctionMode):
    """While it is entered, notes sizes of tables that tokens are looked up in, and of logits that have labels."""

    def __init__(self, run: PreparedModel) -> None:
        super().__init__()
        self._run = run
        self._tables: dict[int, tuple[int, bool]] = {}
        """By weight: its rows, and whether all that was looked up in it were the tokens of a sequence."""
        self._num_classes: set[int] = set()

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        kwargs = kwargs or {}
        if func is F.embedding:
            self._note_table(*args[:2], **{key: kwargs[key] for key in ("input", "weight") if key in kwargs})
        elif func in (F.cross_entropy, F.nll_loss):
            self._note_classes(*args[:2], **{key: kwargs[key] for key in ("input", "target") if key in kwargs})
        return func(*args, **kwargs)

    def _note_table(self, input: Any, weight: Any) -> None:
        if not isinstance(input, Tensor) or not isinstance(weight, Tensor) or input.is_floating_point():
            return
        ids = input.detach().flatten().cpu().numpy()
        is_tokens = any(np.array_equal(ids, tokens) for tokens in self._sequences())
        rows, before = self._tables.get(id(weight), (weight.shape[0], True))
        self._tables[id(weight)] = rows, before and is_tokens

    def _sequences(self) -> list[np.ndarray]:
        """The two sequences that the forward is tried with."""
        source = self._run.collator.source
        return [np.asarray(source.tokens(number)) for number in (0, 1)]

    def _note_classes(self, input: Any, target: Any) -> None:
        if not isinstance(target, Tensor) or target.is_floating_point() or input.dim() != target.dim() + 1:
            return
        ids = target.detach().flatten().cpu().numpy()
        ids = ids[ids >= 0]
        if self._run.collator.objective != NEXT_TOKEN or any(
            np.array_equal(ids, tokens[1:]) for tokens in self._sequences()
        ):
            self._num_classes.add(int(input.shape[1] if input.dim() > 1 else input.shape[0]))

    def check(self, largest_token: tuple[int, str] | None, largest_label: tuple[int, str] | None) -> None:
        """Raise ``InputError`` if the corpus has a token without a row, or a label without a class.

        The largest of each come with where they are.
        """
        name = type(self._run.model).__name__
        check_embedded(self._run.model, largest_token)
        _check_token(
            name, min((rows for rows, is_tokens in self._tables.values() if is_tokens), default=None), largest_token
        )
        if len(self._num_classes) != 1 or largest_label is None:
            return
        limit = min(self._num_classes)
        if largest_label[0] >= limit:
            raise InputError(
                f"{largest_label[1]} has label {largest_label[0]:,}, and {name} predicts labels up to {limit - 1:,}; "
                "use its tokenizer, or a head of as many classes"
            )


def check_embedded(model: nn.Module, largest_token: tuple[int, str] | None) -> None:
    """Raise ``InputError`` if a model that names its embedding, as of transformers, has no row there for a token."""
    _check_token(type(model).__name__, getattr(input_embeddings(model), "num_embeddings", None), largest_token)


def _check_token(name: str, rows: int | None, largest: tuple[int, str] | None) -> None:
    if rows is not None and largest is not None and largest[0] >= rows:
        raise InputError(
            f"{largest[1]} has token id {largest[0]:,}, {name} embeds ids up to {rows - 1:,}; use its tokenizer"
        )
