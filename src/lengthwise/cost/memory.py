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

    Counted from the operators of ``runtime.model.llama``: the inputs of both norms, which are the residual stream, and
    of the products with weights; query, key, value and output of attention with a float32 log-sum-exp per head; the
    activation's inputs and output; eight bytes of norm statistics. A recomputed layer keeps its input alone; one such
    layer is alive at a time while the backward runs. The loss keeps the final norm's input, output and its gradient.
    """
    if model.family != "llama":
        raise InputError(f"no memory model yet for family {model.family!r} (model {model.name}); known: llama")
    width = DTYPE_BYTES[dtype]
    residual, heads = model.hidden_size, (model.num_heads + model.num_kv_heads) * model.head_size
    ffn = (3 if model.gated_ffn else 2) * model.ffn_size
    layer = (4 * residual + 2 * heads + ffn) * width + 4 * model.num_heads + 8
    layers = model.num_layers * residual * width + layer if recompute else model.num_layers * layer
    return layers + 3 * residual * width
