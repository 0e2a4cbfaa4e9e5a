"""The sequences of a run: one index, or several mixed, seen through their length rule."""

from collections import Counter
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from lengthwise.config.run_config import DataConfig, PartConfig
from lengthwise.core.errors import InputError
from lengthwise.core.lengths import LengthIndex
from lengthwise.data.holdout import hold_out
from lengthwise.data.max_length import CorpusView, LengthLedger, apply_max_length
from lengthwise.data.mixture import Mixture, solve_repeats
from lengthwise.data.order import EverySequence, Selection
from lengthwise.index.store import TokenStore, open_index
from lengthwise.index.tokenizers import file_digest


@dataclass(frozen=True, kw_only=True, eq=False)
class CorpusPart:
    """One index of a run."""

    name: str
    store: TokenStore
    view: CorpusView
    repeat: Fraction = Fraction(1)
    """Passes over it in an epoch."""

    def tokens(self, id: int) -> np.ndarray:
        """[length] unsigned integers, read-only."""
        start = int(self.view.starts[id])
        return self.store.tokens(int(self.view.base_ids[id]))[start : start + int(self.view.lengths.lengths[id])]

    def loss_mask(self, id: int) -> np.ndarray | None:
        """[length] booleans, true for tokens that have a loss; None: all have one."""
        mask, start = self.store.loss_mask(int(self.view.base_ids[id])), int(self.view.starts[id])
        return None if mask is None else mask[start : start + int(self.view.lengths.lengths[id])]


@dataclass(frozen=True, kw_only=True, eq=False)
class Corpus:
    """Token ids by sequence id, after the length rule; the ids of several parts are laid end to end."""

    parts: tuple[CorpusPart, ...]
    is_mixture: bool = False

    def __len__(self) -> int:
        return len(self.lengths)

    @cached_property
    def lengths(self) -> LengthIndex:
        """Length of every sequence; what sampler and planner work on. Its digest covers indexes, rule and limit."""
        views, targets = [part.view.lengths for part in self.parts], None
        if self.has_loss_mask:
            counts = [
                part.store.count_targets(part.view.base_ids, part.view.starts, part.view.lengths.lengths)
                for part in self.parts
            ]
            targets = np.concatenate(counts)
        if len(views) == 1:
            return replace(views[0], targets=targets)
        all_lengths, digest = np.concatenate([view.lengths for view in views]), "+".join(view.digest for view in views)
        return LengthIndex(lengths=all_lengths, corpus_digest=digest, targets=targets)

    @cached_property
    def starts(self) -> np.ndarray:
        """[num_parts + 1] the first id of each part, and the number of all."""
        return np.cumsum([0, *(len(part.view.lengths) for part in self.parts)])

    @property
    def digest(self) -> str:
        """Sixteen hex digits over the indexes, the rule and its limit."""
        return self.lengths.digest

    @property
    def has_tokens(self) -> bool:
        """Whether there are tokens, not lengths alone."""
        return all(part.store.has_tokens for part in self.parts)

    @property
    def has_loss_mask(self) -> bool:
        """Whether some index says which of its tokens have a loss."""
        return any(part.store.has_loss_mask for part in self.parts)

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest token id."""
        return max(part.store.vocab_size for part in self.parts)

    @property
    def eos_id(self) -> int | None:
        """The token at the end of every sequence, if any."""
        return self.parts[0].store.eos_id

    @cached_property
    def ledger(self) -> LengthLedger:
        """What the length rule did, to all parts together."""
        ledgers = [part.view.ledger for part in self.parts]
        counted = [field.name for field in fields(LengthLedger) if field.name not in ("rule", "max_length")]
        sums = {name: sum(getattr(ledger, name) for ledger in ledgers) for name in counted}
        return LengthLedger(rule=ledgers[0].rule, max_length=ledgers[0].max_length, **sums)

    def mixture(self, seed: int) -> Mixture:
        """How often each part is passed over."""
        sizes = tuple(len(part.view.lengths) for part in self.parts)
        return Mixture(sizes=sizes, repeats=tuple(part.repeat for part in self.parts), seed=seed)

    def selection(self, seed: int) -> Selection:
        """Selection of the sequences of an epoch."""
        return self.mixture(seed) if self.is_mixture else EverySequence(len(self))

    def epoch_lengths(self, seed: int) -> LengthIndex:
        """Lengths of the sequences of the first epoch: each part of a mixture as often as it is passed over."""
        if not self.is_mixture:
            return self.lengths
        return replace(self.lengths.select(self.selection(seed).ids(0)), corpus_digest=self.digest)

    def part_of(self, ids: np.ndarray) -> np.ndarray:
        """Number of the part that each sequence is of."""
        return np.searchsorted(self.starts, ids, side="right") - 1

    def tokens(self, id: int) -> np.ndarray:
        """[length] unsigned integers, read-only."""
        part, id = self._place(id)
        return part.tokens(id)

    def loss_mask(self, id: int) -> np.ndarray | None:
        """[length] booleans, true for tokens that have a loss; None: all have one."""
        part, id = self._place(id)
        return part.loss_mask(id)

    def _place(self, id: int) -> tuple[CorpusPart, int]:
        """The part that a sequence is of, and its number there."""
        if not 0 <= id < len(self):
            raise InputError(f"no sequence {id} in this corpus: it has {len(self):,}, counted from 0")
        number = int(self.part_of(np.array(id))) if len(self.parts) > 1 else 0
        return self.parts[number], id - int(self.starts[number])

    def check_tokens(self) -> None:
        """Raise ``InputError`` naming a part that holds lengths alone."""
        for part in self.parts:
            if not part.store.has_tokens:
                raise InputError(f"{part.store.path} holds lengths alone; training needs an index with tokens")


def open_corpus(config: DataConfig) -> Corpus:
    """The corpus that a configuration's ``data`` section trains on; what ``validation_share`` holds out is left out.

    Raises:
        InputError: there is no usable index, its lengths break the rule, or the parts of a mixture do not go together.
    """
    if config.mixture:
        return _open_mixture(config)
    if not config.index:
        raise InputError("data.index is not set; make an index with `lengthwise index` and give its folder")
    store = open_index(config.index)
    return Corpus(parts=(CorpusPart(name=_name(config.index), store=store, view=_view(config, store)),))


def open_validation(config: DataConfig) -> Corpus | None:
    """The validation set of a configuration; None if it names none.

    Raises:
        InputError: it cannot be used, or has other tokens than the corpus that is trained on.
    """
    if config.validation_share is not None:
        parts = config.mixture or (PartConfig(index=config.index),)
        return Corpus(parts=tuple(_held_out(config, part) for part in parts), is_mixture=bool(config.mixture))
    if not config.validation:
        return None
    store, trained = open_index(config.validation), open_corpus(config)
    stores = [*(part.store for part in trained.parts), store]
    name = "data.validation"
    _check_same_tokens([*(part.name for part in trained.parts), name], stores, whole="the run")
    return Corpus(parts=(CorpusPart(name=name, store=store, view=_named_view(config, name, store)),))


def _held_out(config: DataConfig, part: PartConfig) -> CorpusPart:
    store = open_index(part.index)
    return CorpusPart(name=part.name or _name(part.index), store=store, view=_views(config, store)[1])


def _open_mixture(config: DataConfig) -> Corpus:
    names = [part.name or _name(part.index) for part in config.mixture]
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise InputError(f"{names.count(twice[0])} parts of data.mixture are called {twice[0]}; give each its own name")
    stores = [open_index(part.index) for part in config.mixture]
    _check_same_tokens(names, stores)
    views = [_named_view(config, f"part {name} of data.mixture", store) for name, store in zip(names, stores)]
    repeats = _repeats(config.mixture, names, views)
    parts = (
        CorpusPart(name=name, store=store, view=view, repeat=repeat)
        for name, store, view, repeat in zip(names, stores, views, repeats)
    )
    return Corpus(parts=tuple(parts), is_mixture=True)


def _name(index: str) -> str:
    return Path(index).resolve().name


def _view(config: DataConfig, store: TokenStore) -> CorpusView:
    return _views(config, store)[0]


def _views(config: DataConfig, store: TokenStore) -> tuple[CorpusView, CorpusView]:
    """What an index is trained on, and what of it is validated on."""
    return views_of(config, store.lengths)


def views_of(config: DataConfig, lengths: LengthIndex) -> tuple[CorpusView, CorpusView]:
    """What of these lengths is trained on, and what of them is validated on, under the length rule.

    Raises:
        InputError: a length breaks the rule, or nothing is left for one of both.
    """
    view = apply_max_length(lengths, max_length=config.max_length, rule=config.over_length)
    return (view, view) if config.validation_share is None else hold_out(view, config.validation_share)


def _named_view(config: DataConfig, name: str, store: TokenStore) -> CorpusView:
    try:
        return _view(config, store)
    except InputError as error:
        raise InputError(f"{name}: {error}") from None


def _repeats(parts: tuple[PartConfig, ...], names: list[str], views: list[CorpusView]) -> tuple[Fraction, ...]:
    return solve_repeats(
        names,
        repeats=[part.repeat for part in parts],
        shares=[part.share for part in parts],
        num_tokens=[view.lengths.num_tokens for view in views],
    )


def _check_same_tokens(names: list[str], stores: list[TokenStore], *, whole: str = "data.mixture") -> None:
    """Raise ``InputError`` unless the same id is the same token in every part, as far as the indexes can tell."""
    tokenized = [(name, store, _tokenizer(store)) for name, store in zip(names, stores) if store.has_tokens]
    made = [part for part in tokenized if part[2] != _READY]
    for name, store, tokenizer in tokenized:
        if made and tokenizer == _READY and store.vocab_size > made[0][1].vocab_size:
            raise InputError(
                f"parts {made[0][0]} and {name} of {whole} have different tokens: {made[0][0]} has "
                f"{made[0][1].vocab_size:,} ({made[0][2]}), the tokens that {name} was indexed from are ids up to "
                f"{store.vocab_size - 1:,}; index both with one tokenizer"
            )
        if made and tokenizer not in (_READY, made[0][2]):
            raise InputError(
                f"parts {made[0][0]} and {name} of {whole} have different tokens: {made[0][0]} was indexed with "
                f"{made[0][2]}, {name} with {tokenizer}; index one of them again with the tokenizer of the other"
            )


_READY = "tokens"
"""The kind of an index that was made of tokens, by a tokenizer it knows nothing of."""


def _tokenizer(store: TokenStore) -> str:
    """Identity of a tokenizer: its settings, and the digest of its file if it has one."""
    settings: dict[str, Any] = store.info["tokenizer"]
    words = [str(value) for name, value in settings.items() if name not in ("path", "eos_token", "append_eos")]
    file = store.path / "tokenizer.json"
    return " ".join(words + ([file_digest(file)] if settings["path"] and file.is_file() else []))
