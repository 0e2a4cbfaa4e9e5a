"""Bytes of the model state and of what layers keep for their backward."""

from lengthwise.core.errors import InputError
from lengthwise.core.layout import shard_size
from lengthwise.core.specs import ModelSpec

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}
FAMILIES = ("llama", "gpt", "bert", "transformer-1d", "transformer-2d", "generic")
"""Families whose layers are one attention and one feed-forward, each behind a norm."""


def gradient_bytes(dtype: str, *, is_narrow: bool = False) -> int:
    """Bytes of a gradient as it is added up: in float32 or above, or where ``is_narrow`` in the compute dtype."""
    return DTYPE_BYTES[dtype] if is_narrow else max(4, DTYPE_BYTES[dtype])


def state_bytes(
    model: ModelSpec, *, num_devices: int, dtype: str, num_held: int | None = None, on_host: bool = False,
    narrow_gradients: bool = False, gradient_shares: int = 1,
) -> int:  # fmt: skip
    """Bytes of the model state per device: the sum of :func:`state_parts`."""
    parts = state_parts(
        model, num_devices=num_devices, dtype=dtype, num_held=num_held, on_host=on_host,
        narrow_gradients=narrow_gradients, gradient_shares=gradient_shares,
    )  # fmt: skip
    return sum(parts)


def state_parts(
    model: ModelSpec,
    *,
    num_devices: int,
    dtype: str,
    num_held: int | None = None,
    on_host: bool = False,
    narrow_gradients: bool = False,
    gradient_shares: int = 1,
) -> tuple[int, int, int]:
    """Bytes of weights and gradients held, and of the optimizer, which is fully sharded, per device.

    Weights in the compute dtype and gradients at master precision, ``num_held`` of each (all, if not given). Spread
    over all devices: master weights, their summed gradients and the two moments of AdamW. One device alone updates the
    gradients it has, and the weights it has if they are of the master's dtype. With ``narrow_gradients`` all gradients
    are in the compute dtype: of 16 bits each, what is spread is 3/4 of the state but for those sums (Hydraulis, B.1).
    With ``gradient_shares`` a device keeps one of so many shares of the gradients of what it holds.

    With ``on_host`` the optimizer's are in the host's memory, and what goes there or comes is on the device for two
    units at a time. One device alone sums the gradients of one unit, while two parameters' are on their way.
    """
    compute, master = DTYPE_BYTES[dtype], max(4, DTYPE_BYTES[dtype])
    gradient = gradient_bytes(dtype, is_narrow=narrow_gradients)
    num_params = model.num_params if num_held is None else num_held
    if on_host:
        under_way = 2 * min(num_params, largest_matrix(model))
        if num_devices == 1:
            return num_params * compute, min(num_params, largest_unit(model) + under_way) * gradient, 0
        num_kept = shard_size(num_params, gradient_shares)
        return num_params * compute, num_kept * gradient, shard_size(under_way, num_devices) * (compute + gradient)
    sharded = 3 * master + gradient
    if num_devices == 1:
        sharded = 2 * master if compute == master else 3 * master
    num_kept = shard_size(num_params, gradient_shares)
    return num_params * compute, num_kept * gradient, sharded * shard_size(model.num_params, num_devices)


def host_state_bytes(model: ModelSpec, *, num_devices: int, dtype: str) -> int:
    """Bytes of the model state that each device has in the host's memory where the optimizer is there: master weights,
    their gradients and the two moments of AdamW, and two units on their way.
    """
    compute, master = DTYPE_BYTES[dtype], max(4, DTYPE_BYTES[dtype])
    under_way = 2 * shard_size(largest_matrix(model), num_devices) * (compute + master)
    return 4 * master * shard_size(model.num_params, num_devices) + under_way


def largest_matrix(model: ModelSpec) -> int:
    """Parameters of the largest matrix: of the embedding, or of a feed-forward's."""
    return model.hidden_size * max(model.vocab_size, model.ffn_columns)


def largest_unit(model: ModelSpec) -> int:
    """Parameters of the largest unit: a layer, or the embedding or head."""
    layer = model.layer_matmul_params + model.idle_ffn_params + model.layer_whole_params
    return max(layer, model.hidden_size * model.vocab_size + model.output_whole_params)


def larger_unit_gradients(model: ModelSpec) -> int:
    """Parameters by which gradients on their way to the host's memory are more in the head's backward than in a layer's
    attention, where one device alone has them.
    """
    layer = model.layer_matmul_params + model.idle_ffn_params + model.layer_whole_params
    matrix = model.hidden_size * model.ffn_columns
    return largest_unit(model) - layer + 2 * (largest_matrix(model) - matrix)


def kept_bytes_per_layer(model: ModelSpec, width: int) -> float:
    """Bytes per token that one layer leaves for its backward, in numbers of ``width`` bytes.

    Counted from the operators of ``runtime.model.llama``: the inputs of both norms, which are the residual stream, and
    of the products with weights; query, key, value and output of attention with a float32 log-sum-exp per head; the
    activation's inputs and output; the norms' statistics.

    Raises:
        InputError: no memory model for this family.
    """
    if model.family not in FAMILIES:
        raise InputError(
            f"no memory model for family {model.family!r} (model {model.name}); known: {', '.join(FAMILIES)}"
        )
    heads = (model.num_heads + model.num_kv_heads) * model.head_size
    ffn = (3 if model.gated_ffn else 2) * model.ffn_size
    return (4 * model.hidden_size + 2 * heads + ffn) * width + 4 * model.num_heads + norm_bytes(model)


def norm_bytes(model: ModelSpec) -> int:
    """Bytes per token of the statistics of a layer's two norms: a scale in float32, of layer norms also a mean."""
    return 16 if model.has_all_biases else 8


def loss_bytes_per_token(model: ModelSpec, width: int) -> float:
    """Bytes per token that the loss keeps: the final norm's input, output and its gradient.

    BERT's transform keeps its input and the input of its GELU too.
    """
    return (5 if model.family == "bert" else 3) * model.hidden_size * width
