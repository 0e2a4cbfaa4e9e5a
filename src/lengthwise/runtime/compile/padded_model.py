"""A whole model compiled for padded batches of a few shapes: for training loops that are not ours.

lattice = padded_lattice(lengths, most=8, budget=16_384)
zeros = partial(torch.zeros, dtype=torch.int64)
model = lengthwise.compile(model, lattice.shapes, lambda *shape: dict(input_ids=zeros(shape), labels=zeros(shape)))
...
loss = model(**batch).loss      # a batch of one of the shapes; of another, an error that names it
model.recompiles                # 0
"""

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lengthwise.core.arguments import read_shapes
from lengthwise.core.errors import InputError
from lengthwise.runtime.compile.graphs import INDUCTOR, GraphCount, allow_shapes, check_compiler, mode_of

Shape = tuple[int, int]
"""Rows and their length."""


def _loss(output: Any) -> Tensor:
    loss: Tensor = output if isinstance(output, Tensor) else output.loss
    return loss


def compile(
    model: nn.Module,
    shapes: Iterable[Shape],
    make_batch: Callable[[int, int], Mapping[str, Any]],
    *,
    loss: Callable[[Any], Tensor] = _loss,
    backend: str = INDUCTOR,
    bucket_mib: float | None = None,
) -> "CompiledModel":
    """``model`` compiled for batches of ``shapes`` alone, all of them at once: forward and backward of each.

    On one GPU with CUDA graphs, in a distributed run without. Weights, their gradients, buffers and random numbers are
    what they were. Compile before wrapping for data parallelism, on every rank, and wrap what this returns:
    ``DistributedDataParallel(compiled)``.

    Args:
        model: on its device, in the mode it will run in.
        shapes: (rows, length) of padded batches, as ``padded_lattice(...).shapes``.
        make_batch: from rows and length to a made-up batch: what the model is called with, by name; of its tensors, the
            first one's shape is the batch's. As the loop will call it: an argument more, or one tensor in two places,
            is another graph.
        loss: the scalar that training differentiates, of what the model returns; its ``loss``, if left out.
        backend: of ``torch.compile``.
        bucket_mib: cut the model where gradients of so many MiB are complete, as ``torch.compile`` cuts it within
            DistributedDataParallel (25 there), so that these are summed while the backward goes on; None: one graph,
            whose gradients come together at its end.

    Raises:
        InputError: there are no shapes, ``make_batch`` makes other ones, the model is wrapped for data parallelism
            already, or there is nothing here to compile with.
    """
    if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        raise InputError(
            f"{type(model).__name__} is wrapped with DistributedDataParallel, which cannot be called with made-up "
            "batches without summing their gradients; compile the model first and wrap what that returns: "
            "DistributedDataParallel(lengthwise.compile(model, ...))"
        )
    if bucket_mib is not None and not bucket_mib > 0:
        raise InputError(f"bucket_mib={bucket_mib} is the size of gradients that are summed together; give more than 0")
    compiled = CompiledModel(model, shapes, backend=backend, make_batch=make_batch, loss=loss, bucket_mib=bucket_mib)
    compiled.reset()
    return compiled


class CompiledModel(nn.Module):
    """Calls a model by compiled code; what :func:`compile` returns."""

    _run: Callable[..., Any]

    def __init__(
        self,
        model: nn.Module,
        shapes: Iterable[Shape],
        *,
        backend: str,
        make_batch: Callable[[int, int], Mapping[str, Any]],
        loss: Callable[[Any], Tensor],
        bucket_mib: float | None,
    ) -> None:
        """Nothing is compiled before :meth:`reset`."""
        super().__init__()
        device = next(model.parameters()).device
        check_compiler(device, backend)
        self.model, self.shapes = model, _largest_first(shapes)
        self._make_batch, self._loss, self._bucket_mib = make_batch, loss, bucket_mib
        self._is_alone = not dist.is_initialized() or dist.get_world_size() == 1
        mode = mode_of(device, cuda_graphs=self._is_alone) if backend == INDUCTOR else None
        self._options = {"dynamic": False, "backend": backend, "mode": mode}
        self._is_wrapped: bool | None = None
        self.start_counting()

    def reset(self, shapes: Iterable[Shape] | None = None) -> None:
        """Free all that was compiled in this process, and compile ``shapes``, or the same ones, before the next call.

        Between groups of shapes, so that no more code is kept than that of one group. Other compiled functions compile
        again when they are called. Call it between steps, on every rank.

        Raises:
            InputError: there are no shapes, or ``make_batch`` makes other ones.
        """
        self.shapes = self.shapes if shapes is None else _largest_first(shapes)
        if "_run" in vars(self):
            del vars(self)["_run"]
            torch.compiler.reset()
            gc.collect()
        allow_shapes(len(self.shapes))
        # Not as a module of this one, which would have all parameters a second time.
        vars(self)["_run"] = torch.compile(self.model, **self._options)  # type: ignore[call-overload]
        weights = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        with _unchanged(self.model), _cut_by(self._bucket_mib):
            for shape in self.shapes:
                batch = self._make_batch(*shape)
                self._check_shape(batch, f"make_batch{shape} is not what it was asked for: ")
                torch.autograd.grad(self._loss(self._run(**batch)), weights, allow_unused=True)
        self.start_counting()

    def start_counting(self) -> None:
        """Count whatever is compiled from now on as a recompile."""
        self._count, self._recompiles, self._is_wrapped = GraphCount(), 0, None

    @property
    def recompiles(self) -> int:
        """Graphs compiled since :func:`compile` returned: 0, unless something else than the shape changed."""
        self._recompiles += self._count.new()
        return self._recompiles

    def forward(self, **batch: Any) -> Any:
        """Run the compiled model on a batch of one of the shapes; without gradients, the model as it is, on any batch.

        Raises:
            InputError: it is of another shape, there is no tensor in it, or its gradients would not be summed.
        """
        if not torch.is_grad_enabled():  # another graph, which nothing compiled beforehand
            return self.model(**batch)
        self._check_sums_gradients()
        self._check_shape(batch)
        return self._run(**batch)

    def _check_shape(self, batch: Mapping[str, Any], where: str = "") -> None:
        """Raise ``InputError``, which begins with ``where``, if a batch has none of the shapes."""
        shape = next((tuple(value.shape[:2]) for value in batch.values() if isinstance(value, Tensor)), None)
        if shape not in self.shapes:
            shapes = ", ".join(f"{rows} x {length:,}" for rows, length in self.shapes)
            what = "no tensor" if shape is None else f"shape {' x '.join(f'{size:,}' for size in shape)}"
            raise InputError(
                f"{where}a batch of {what} is none that the model is compiled for: {shapes}; pad it to one of them, "
                "with rows of padding alone where there are too few, or compile for its shape too"
            )

    def _check_sums_gradients(self) -> None:
        """Raise ``InputError`` if DistributedDataParallel wraps the model and would not hear of this call.

        It sums the gradients of what is called through it; other calls leave every rank its own, without a word.
        """
        if self._is_alone or DistributedDataParallel._active_ddp_module is not None:
            return
        if self._is_wrapped is None:
            wrappers = (wrapper for wrapper in gc.get_objects() if type(wrapper) is DistributedDataParallel)
            self._is_wrapped = any(wrapper.module is self.model or wrapper.module is self for wrapper in wrappers)
        if self._is_wrapped:
            raise InputError(
                "the compiled model was called beside DistributedDataParallel, which sums gradients only of calls that "
                "go through it: wrap what lengthwise.compile returned, ddp = DistributedDataParallel(compiled), and "
                "call ddp(**batch)"
            )


def _largest_first(shapes: Iterable[Shape]) -> tuple[Shape, ...]:
    """Distinct shapes, those of most tokens first.

    Raises:
        InputError: there are none.
    """
    wanted = set(read_shapes(shapes))
    if not wanted:
        raise InputError("compile needs at least one shape, (rows, length); make some with padded_lattice(...).shapes")
    return tuple(sorted(wanted, key=lambda shape: -shape[0] * shape[1]))


@contextmanager
def _cut_by(bucket_mib: float | None) -> Iterator[None]:
    """Within, ``torch.compile`` cuts graphs as if DistributedDataParallel called it with buckets of that size."""
    if bucket_mib is None:
        yield
        return
    caller: Any = SimpleNamespace(bucket_bytes_cap=int(bucket_mib * 2**20))  # all that the compiler asks of it
    DistributedDataParallel._active_ddp_module = caller
    try:
        yield
    finally:
        DistributedDataParallel._active_ddp_module = None


@contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    """Leave random numbers and buffers as they are; gradients are not accumulated inside."""
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    device = next(model.parameters()).device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        yield
    with torch.no_grad():
        for buffer, value in buffers:
            buffer.copy_(value)
