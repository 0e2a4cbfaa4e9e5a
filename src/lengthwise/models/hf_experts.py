"""Mixtures of experts in a ``config.json``: feed-forward columns that a token uses, and those that a layer stores.

Families call the same numbers by many names. A field about experts that is not read here must not make a model dense,
or be left out in silence: it is refused, or named.
"""

from lengthwise.core.errors import InputError
from lengthwise.core.read_file import brief
from lengthwise.models.hf_fields import NAMES, PricedFields

_SIZES = ("num_experts", "experts_per_token", "expert_size", "shared_size", "num_shared", "first_dense", "moe_every")
_READ = frozenset(name for what in _SIZES for name in NAMES[what]) | {
    "moe_layer_freq", "moe_layers", "mlp_only_layers", "moe_layer_end_index", "interleave_moe_layer_step",
}  # fmt: skip
_OF_ROUTING = frozenset({"num_expert_group", "expert_layer_offset"})
"""Whole numbers that say how tokens are routed, which changes no size."""
_SWITCHES = ("is_moe", "enable_moe_block")


def ffn_columns(fields: PricedFields, dense_size: int, num_layers: int) -> tuple[int, int, list[str]]:
    """Feed-forward columns that a token uses and that a layer stores, as means over layers, and what has no price.

    Raises:
        InputError: tokens use more experts than there are, or fields speak of experts and none says how many.
    """
    if any(fields.values.get(name) is False for name in _SWITCHES):
        return dense_size, 0, []
    num_experts = fields.size("num_experts")
    unread = _unread(fields)
    if num_experts is None and unread:
        names = " or ".join(NAMES["num_experts"])
        raise InputError(
            f"{fields.path}: {unread[0]} is of a mixture of experts, and no {names} says how many there are; "
            "such layers have no cost model"
        )
    if num_experts is None or num_experts < 2:
        return dense_size, 0, []
    expert_size = fields.size("expert_size") or fields.size("ffn_size") or dense_size
    per_token = fields.needed("experts_per_token")
    if per_token > num_experts:
        raise InputError(f"{fields.path}: {per_token} experts per token of {num_experts} are too many")
    is_llama4 = "intermediate_size_mlp" in fields.values  # the one family with a shared expert that no field counts
    shared_size = fields.size("shared_size") or (fields.size("num_shared") or is_llama4) * expert_size
    num_sparse = _num_sparse_layers(fields, num_layers)
    dense = (num_layers - num_sparse) * dense_size
    used, stored = (
        round((dense + num_sparse * (count * expert_size + shared_size)) / num_layers)
        for count in (per_token, num_experts)
    )
    words = ["routing between experts", *unread]
    if num_sparse < num_layers:
        words.append(f"the difference between {num_layers - num_sparse} dense and {num_sparse} expert layers")
    return used, stored, words


def _unread(fields: PricedFields) -> list[str]:
    """Fields with numbers about experts that nothing here reads, as ``name = value``; switches and shares aside.

    Where no field says how many experts there are, also those that are read.
    """
    read = _OF_ROUTING | (_READ if fields.size("num_experts") is not None else frozenset())
    return [
        f"{name} = {brief(value, 40)}"
        for name, value in fields.values.items()
        if ("expert" in name or name.startswith("moe_") or "_moe_" in name)
        and name not in read
        and ((type(value) is int and value > 0) or (isinstance(value, list | dict) and value))
    ]


def _num_sparse_layers(fields: PricedFields, num_layers: int) -> int:
    """How many layers are mixtures of experts."""
    if kinds := fields.names("mlp_layer_types"):
        return min(num_layers, sum(kind != "dense" for kind in kinds))
    frequency = fields.values.get("moe_layer_freq")
    if isinstance(frequency, list):
        return min(num_layers, sum(bool(flag) for flag in frequency))
    if named := fields.names("moe_layers"):
        return min(num_layers, len(named))
    every = fields.size("moe_every") or (frequency if type(frequency) is int and frequency > 0 else 1)
    dense = {layer for layer in fields.names("mlp_only_layers") if type(layer) is int}
    last = fields.values.get("moe_layer_end_index")
    end = min(num_layers, last + 1) if type(last) is int and last >= 0 else num_layers
    return sum((layer + 1) % every == 0 and layer not in dense for layer in range(fields.size("first_dense") or 0, end))
