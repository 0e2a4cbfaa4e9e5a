"""Registry of model families, and models with random weights."""

from hashlib import blake2b

import torch
from torch import Tensor

from lengthwise.core.errors import InputError
from lengthwise.core.specs import ModelSpec
from lengthwise.runtime.models.base import Transformer
from lengthwise.runtime.models.bert import Bert
from lengthwise.runtime.models.gpt import Gpt
from lengthwise.runtime.models.llama import Llama

INIT_STD = 0.02
FAMILIES: dict[str, type[Transformer]] = {
    "llama": Llama,
    "transformer-1d": Llama,
    "transformer-2d": Llama,
    "gpt": Gpt,
    "bert": Bert,
}


def empty_model(
    spec: ModelSpec, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "meta"
) -> Transformer:
    """Build the model of ``spec`` without values for its weights.

    Raises:
        InputError: no model of this family, or sizes that its family cannot have.
    """
    if spec.family not in FAMILIES:
        raise InputError(f"model {spec.name}: no family {spec.family!r}; known: {', '.join(FAMILIES)}")
    _check_family(spec)
    return FAMILIES[spec.family](spec, dtype=dtype, device=device)


def _check_family(spec: ModelSpec) -> None:
    if spec.family == "llama" and not (spec.gated_ffn and spec.causal):
        raise InputError(f"model {spec.name} is not a causal Llama with a gated feed-forward; set its family")
    if spec.family == "transformer-2d" and (spec.causal or spec.frame_size < 1):
        raise InputError(f"model {spec.name}: a transformer-2d is not causal and needs frame_size, tokens of a frame")
    if spec.family not in ("gpt", "bert"):
        if spec.max_positions:
            raise InputError(f"model {spec.name}: a {spec.family} has rotary positions; max_positions must be 0")
        return
    if spec.causal != (spec.family == "gpt"):
        raise InputError(f"model {spec.name}: a gpt is causal and a bert is not; this {spec.family} is otherwise")
    if spec.gated_ffn:
        raise InputError(f"model {spec.name}: the feed-forward of a {spec.family} has no gate; set gated_ffn to false")
    if not spec.qkv_bias:
        raise InputError(f"model {spec.name}: a {spec.family} has biases everywhere; set qkv_bias to true")
    if spec.max_positions < 1:
        raise InputError(f"model {spec.name}: a {spec.family} has learned positions; set max_positions, how many")


def build_model(
    spec: ModelSpec, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu", seed: int = 0
) -> Transformer:
    """Build the model of ``spec`` with random weights that depend on ``seed`` alone, not on dtype or device.

    Each weight is drawn in float32 from its own generator, seeded by its name: normal, standard deviation 0.02, divided
    by sqrt(2 L) in the two projections into the residual stream (GPT-2). On device ``meta`` nothing is drawn.

    Raises:
        InputError: as :func:`empty_model`.
    """
    model = empty_model(spec, dtype=dtype, device=device)
    if torch.device(device).type != "meta":
        with torch.no_grad():
            for name, weight in model.named_parameters():
                weight.copy_(initial_value(name, tuple(weight.shape), num_layers=spec.num_layers, seed=seed))
    return model


def initial_value(name: str, shape: tuple[int, ...], *, num_layers: int, seed: int) -> Tensor:
    """The float32 value that the weight called ``name`` starts with."""
    kind = name.rpartition(".")[2]
    if kind.endswith("norm"):
        return torch.ones(shape)
    if kind.endswith("bias"):
        return torch.zeros(shape)
    digest = blake2b(f"{seed}/{name}".encode(), digest_size=7).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest))
    std = INIT_STD / (2 * num_layers) ** 0.5 if kind in ("proj", "down") else INIT_STD
    return torch.randn(shape, generator=generator) * std
