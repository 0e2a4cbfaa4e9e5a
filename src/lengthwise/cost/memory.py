"""Bytes of the model state and of what a dense layer keeps for its backward."""

from lengthwise.core.errors import InputError
from lengthwise.core.layout import shard_size
from lengthwise.core.specs import ModelSpec

DTYPE_BYTES = {"bfloat16": 2, "float32": 4, "float64": 8}


def state_bytes(model: ModelSpec, *, num_devices: int, dtype: str) -> int:
    """Bytes per device that are there whatever is computed, with weights whole and the optimizer fully sharded.

    Weights in the compute dtype and gradients at master precision are whole. The two moments of AdamW are spread over
    all devices, and so are the master weights unless the compute weights have their dtype and serve as such.
    """
    compute, master = DTYPE_BYTES[dtype], max(4, DTYPE_BYTES[dtype])
    sharded = 2 * master if compute == master else 3 * master
    return model.num_params * (compute + master) + sharded * shard_size(model.num_params, num_devices)


def kept_bytes_per_token(model: ModelSpec, *, dtype: str, recompute: bool) -> float:
    """Bytes per token that one forward leaves for the backward on a device that computes whole layers.

    Counted from the operators of ``runtime.model.llama``: the inputs of both norms, of the four products with weights
    and of the activation, and what attention keeps: query, key, value, output and a log-sum-exp per head in float32.
    A recomputed layer keeps its input alone; one such layer is alive at a time while the backward runs.
    """
    if model.family != "llama":
        raise InputError(f"no memory model yet for family {model.family!r} (model {model.name}); known: llama")
    width = DTYPE_BYTES[dtype]
    attention = (3 * model.hidden_size + model.qkv_size + 2 * model.num_heads * model.head_size) * width
    attention += 4 * model.num_heads
    ffn = (2 * model.hidden_size + (4 if model.gated_ffn else 2) * model.ffn_size) * width
    boundary = model.hidden_size * width
    layers = model.num_layers * boundary + attention + ffn if recompute else model.num_layers * (attention + ffn)
    return layers + 4 * boundary  # embedding output, final norm in and out, gradient of the loss
