"""Derive the position ids that a transformers model computes from a whole sequence when it is given none.

Most models count from 0. RoBERTa and its relatives count from the padding token's id + 1 and leave padding tokens out;
others may start anew at a separator. So the model's own forward is asked: it runs on a whole sequence up to its first
layer, and the rows that it looks up in its tables of positions are noted.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from inspect import Parameter, signature
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from lengthwise.core.errors import InputError
from lengthwise.runtime.wrap.layer_hooks import HookedLayers, LayerReachedError
from lengthwise.runtime.wrap.micro_batch import MicroBatch
from lengthwise.runtime.wrap.model_accessors import input_embeddings, readable

_NAME = "position_ids"
_PROBE_LENGTH = 48
"""Tokens of the sequence that the rule is learned from, where the model's tables are long enough."""


@dataclass(frozen=True, kw_only=True)
class _Lookup:
    """Positions that a forward used: rows of a table, or the argument of a module."""

    where: str
    values: Tensor = field(repr=False)


@dataclass(frozen=True, kw_only=True)
class _Rule:
    """A rule for position ids: the values of lookup ``number`` of the stock forward, less ``offset``."""

    number: int
    offset: int


class _PositionFoundError(Exception):
    """Stops a stock forward after the lookup that is asked for."""


class _Lookups(TorchFunctionMode):
    """Records which rows of the model's tables are read by integer tensors."""

    def __init__(self, tables: dict[int, str], until: int | None) -> None:
        super().__init__()
        self.noted: list[_Lookup] = []
        self._tables, self._until = tables, until

    def note(self, where: str, values: Any) -> None:
        """Record a lookup; stop the forward after the one that is asked for."""
        if not isinstance(values, Tensor) or values.is_floating_point() or values.dtype == torch.bool:
            return
        self.noted.append(_Lookup(where=where, values=values.detach().clone()))
        if self._until is not None and len(self.noted) > self._until:
            raise _PositionFoundError

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        kwargs = kwargs or {}
        table, index = None, None
        if func in (F.embedding, torch.embedding):
            operands = [*args, *(kwargs[name] for name in ("input", "weight", "indices") if name in kwargs)][:2]
            index, table = operands if func is F.embedding else reversed(operands)
        elif func in (Tensor.index_select, torch.index_select, Tensor.__getitem__, Tensor.gather, torch.gather):
            table, index = args[0], args[-1] if func is not Tensor.__getitem__ else args[1]
        if id(table) in self._tables and not isinstance(index, tuple):
            self.note(self._tables[id(table)], index)
        return func(*args, **kwargs)


class StockPositions:
    """Computes the position ids that a prepared transformers model would derive by itself."""

    def __init__(self, model: nn.Module, forward: Callable[..., Any], layers: HookedLayers) -> None:
        """``forward``: the model's own forward."""
        self._model, self._forward, self._layers = model, forward, layers
        parameters = signature(forward).parameters
        self.is_argument = _NAME in parameters or any(p.kind is Parameter.VAR_KEYWORD for p in parameters.values())
        """Whether the forward can be given position ids."""
        self._rule: _Rule | None = None
        self._is_learned = False

    def of(self, micro_batch: MicroBatch) -> Tensor:
        """The position ids [t] of this rank's slots.

        Raises:
            InputError: they cannot be derived.
        """
        shard = micro_batch.shard
        if not self._is_learned:
            self._rule = self._learn(_probe(self._model, micro_batch.tokens))
            self._is_learned = True
        if self._rule is None:
            return micro_batch.positions
        if shard.tree is not None:
            raise InputError(
                f"share_prefixes=True: {type(self._model).__name__} derives positions from all of a sequence's tokens, "
                "and here some are shared; leave share_prefixes out"
            )
        tokens_T = micro_batch.whole().tokens
        whole_T = shard.positions.new_empty(shard.cu_seqlens[-1])
        for start, end in pairwise(shard.cu_seqlens):
            whole_T[start:end] = self._derived(tokens_T[start:end], self._rule)
        return whole_T[torch.from_numpy(shard.places).to(whole_T.device)]

    def _learn(self, tokens: Tensor) -> _Rule | None:
        """Find the rule for the positions of a whole sequence; None: they count from 0."""
        if not self.is_argument:
            return None
        counted = torch.arange(len(tokens), device=tokens.device)
        stock = self._lookups(tokens)
        if stock is None:
            return None  # it cannot be called with tokens alone
        explicit = self._lookups(tokens, counted)
        if explicit is not None and _agree(stock, explicit):
            return None
        for number, (lookup, explicit_lookup) in enumerate(zip(stock, explicit or ())):
            if lookup.where != explicit_lookup.where or lookup.values.shape != explicit_lookup.values.shape:
                break
            if lookup.values.numel() != len(tokens) or torch.equal(lookup.values, explicit_lookup.values):
                continue
            rule = _Rule(number=number, offset=int(explicit_lookup.values.flatten()[0]))  # of position 0
            again = self._lookups(tokens, lookup.values.flatten() - rule.offset)
            if again is not None and _agree(stock, again):
                return rule
        raise InputError(
            f"{type(self._model).__name__} derives positions from input_ids in a way that position_ids cannot repeat, "
            "so its sequences cannot be packed; give them as an argument: prepare(..., inputs=lambda micro_batch: "
            "{'input_ids': micro_batch.tokens[None], 'position_ids': ...})"
        )

    def _derived(self, tokens: Tensor, rule: _Rule) -> Tensor:
        """The position ids [L] of one whole sequence."""
        lookups = self._lookups(tokens, until=rule.number)
        assert lookups is not None and len(lookups) > rule.number, "the forward looks up the same tables as before"
        return lookups[rule.number].values.flatten() - rule.offset

    @torch.no_grad()
    def _lookups(
        self, tokens: Tensor, position_ids: Tensor | None = None, *, until: int | None = None
    ) -> list[_Lookup] | None:
        """Record the lookups of the model's own forward before its first layer; None if it fails."""
        tables = {id(table): name for name, table in [*self._model.named_parameters(), *self._model.named_buffers()]}
        lookups = _Lookups(tables, until)
        options: dict[str, Any] = {"input_ids": tokens[None]}
        if position_ids is not None:
            options[_NAME] = position_ids[None]
        if hasattr(getattr(self._model, "config", None), "use_cache"):
            options["use_cache"] = False
        devices = [tokens.device] if tokens.is_cuda else []
        try:
            with torch.random.fork_rng(devices), self._layers.halted(), self._arguments_noted(lookups), lookups:
                self._forward(**options)
        except (LayerReachedError, _PositionFoundError):
            return lookups.noted
        except Exception:  # whatever a model's code raises
            return None
        return lookups.noted

    @contextmanager
    def _arguments_noted(self, lookups: _Lookups) -> Iterator[None]:
        """Within, record position ids given to modules without parameters, such as rotary embeddings."""

        def note(name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
            bound = signature(module.forward).bind(*args, **kwargs)
            lookups.note(name, bound.arguments.get(_NAME))

        with ExitStack() as stack:
            for name, module in self._model.named_modules():
                if _takes_positions(module):
                    hook = module.register_forward_pre_hook(
                        lambda module, args, kwargs, name=name: note(name, module, args, kwargs), with_kwargs=True
                    )
                    stack.callback(hook.remove)
            yield


def _takes_positions(module: nn.Module) -> bool:
    return _NAME in signature(module.forward).parameters and next(module.parameters(), None) is None


def _agree(first: list[_Lookup], second: list[_Lookup]) -> bool:
    return len(first) == len(second) and all(
        lookup.where == second_lookup.where and torch.equal(lookup.values.flatten(), second_lookup.values.flatten())
        for lookup, second_lookup in zip(first, second)
    )


def _probe(model: nn.Module, tokens: Tensor) -> Tensor:
    """A probe sequence: tokens of the corpus, and between them every special token of the config, such as padding."""
    config = getattr(model, "config", None)
    num_rows = getattr(input_embeddings(model), "num_embeddings", 0)
    named = [readable(config, name) for name in dir(config) if name.endswith("_token_id")]
    ids = [token for value in named for token in (value if isinstance(value, list) else [value])]
    special = sorted({token for token in ids if isinstance(token, int) and 0 <= token < num_rows})
    longest = getattr(config, "max_position_embeddings", None)
    length = min(_PROBE_LENGTH, longest // 2 if isinstance(longest, int) and longest > 3 else _PROBE_LENGTH)
    some = tokens[: max(1, length - len(special))]
    half = len(some) // 2
    return torch.cat([some[:half], tokens.new_tensor(special), some[half:]])[:length]
