"""Layers compiled in two halves, before and after attention, for a fixed set of token counts.

Both halves depend on a token alone, so that their shape is a number of tokens, whatever sequences a pack is made of and
whoever else holds the rest of it: packs and padded batches, one device and several, with and without recompute run the
same graphs. Attention between them runs as it is, on any boundaries. Weights are inputs of a graph, so that all layers
share it.

t tokens of this rank, D hidden size, N heads, H head size.
"""

from collections.abc import Callable, Iterable
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from lengthwise.runtime.compile.graphs import INDUCTOR, MOST_LIVE, GraphCount, allow_shapes, check_compiler, mode_of
from lengthwise.runtime.models.base import Transformer
from lengthwise.runtime.models.execution import OneDevice
from lengthwise.runtime.models.layer import TransformerLayer
from lengthwise.runtime.models.operators import Operators, Tables, feed_forward

OnSize = Callable[[int, int], None]
"""Told how many sizes of how many are compiled."""


@runtime_checkable
class Apart(Protocol):
    """Operators whose attention core is separate from the token-wise halves, with weights that are there."""

    @property
    def tables(self) -> Tables | None:
        """Rotary tables of this rank's tokens."""
        ...

    @property
    def attend(self) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        """Attention core: this rank's queries, keys and values to its outputs ``[t, N, H]``."""
        ...

    @property
    def has_whole_weights(self) -> bool:
        """Whether this rank holds all that it multiplies with."""
        ...


class CompiledLayers:
    """Runs layers of one model by compiled code; what ``Transformer.run_layer`` is set to."""

    def __init__(
        self,
        device: torch.device,
        sizes: Iterable[int],
        *,
        on_size: OnSize | None = None,
        backend: str = INDUCTOR,
        most_live: int = MOST_LIVE,
    ) -> None:
        """``sizes``: tokens that one rank may hold; ``most_live``: how many sizes' code is kept at a time.

        Raises:
            InputError: there is nothing here to compile with.
        """
        check_compiler(device, backend)
        allow_shapes(most_live)
        mode = mode_of(device, cuda_graphs=False) if backend == INDUCTOR else None
        options: dict[str, Any] = {"dynamic": False, "fullgraph": True, "backend": backend, "mode": mode}
        self._before, self._after = (
            torch.compile(before_attention, **options),
            torch.compile(after_attention, **options),
        )
        self.sizes = tuple(sorted(set(sizes), reverse=True))
        self._on_size = on_size
        self._most_live, self._live = most_live, set[int]()
        self._count = GraphCount()

    def __call__(self, layer: nn.Module, x_tD: Tensor, /, operators: Operators) -> Tensor:
        """Run a layer by compiled code; its output ``[t, D]``."""
        if torch.is_grad_enabled():
            return self._run(layer, x_tD, operators)
        with torch.enable_grad():  # else what recompute runs first, without gradients, would be other graphs
            return self._run(layer, x_tD.detach().requires_grad_(), operators).detach()

    def _run(self, layer: nn.Module, x_tD: Tensor, operators: Operators) -> Tensor:
        assert isinstance(layer, TransformerLayer)
        assert isinstance(operators, Apart) and operators.has_whole_weights, "plans of other layers are refused"
        out_tNH = operators.attend(*self._before(layer, x_tD, operators.tables))
        out_tD: Tensor = self._after(layer, x_tD, out_tNH.contiguous())  # strides are part of a shape
        return out_tD

    def warm_up(self, model: Transformer) -> None:
        """Compile forward and backward for every size, the largest first: whether it fits shows at once.

        A made-up layer computes made-up tokens, so that weights, gradients and random numbers stay what they are, and
        no rank waits for another.
        """
        parameter = next(model.parameters())
        device, dtype = parameter.device, parameter.dtype
        devices = [device] if device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            for number, size in enumerate(self.sizes):
                self.make_room((size,))
                layer = _made_up(model, dtype, device)
                tokens = torch.zeros(size, dtype=torch.int64, device=device)
                longest = min(size, model.spec.max_positions or size)
                views = model.views(tuple(dict.fromkeys((*range(0, size, longest), size))))
                alone = OneDevice(tokens, None, views=views, tables=model.tables, layers=range(len(views)))
                x_tD = torch.zeros(size, model.spec.hidden_size, dtype=dtype, device=device, requires_grad=True)
                self(layer, x_tD, alone.operators(0)).sum().backward()
                if self._on_size is not None:
                    self._on_size(number + 1, len(self.sizes))
        self._count.new()

    def make_room(self, sizes: Iterable[int]) -> None:
        """Between steps: these sizes come next. Frees all compiled code if it would be that of too many sizes.

        The compiler's cache on disk remains, so that what comes again is loaded, not compiled.
        """
        wanted = set(sizes)
        if len(self._live | wanted) > self._most_live and not wanted <= self._live:
            torch.compiler.reset()
            self._live = set()
        self._live |= wanted

    def recompiles(self) -> int:
        """Graphs compiled since the warm-up, or since this was last asked."""
        return self._count.new()


def _made_up(model: Transformer, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """Make a layer like those of ``model`` with zeros as weights."""
    layer = type(model.layers[0])(model.spec, dtype=dtype, device=device)
    with torch.no_grad():
        for weight in layer.parameters():
            weight.zero_()
    return layer


def before_attention(layer: TransformerLayer, x_tD: Tensor, tables: Tables | None) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of the layer's input."""
    return layer.attention_weights.project(layer.pre_attention(x_tD), tables)


def after_attention(layer: TransformerLayer, x_tD: Tensor, out_tNH: Tensor) -> Tensor:
    """The layer's output from its input and what attention gave."""
    weights = layer.attention_weights
    return layer.post_attention(x_tD, out_tNH.flatten(1) @ weights.proj, feed_forward)
