"""Names and shapes of a model's parameters, unit by unit, as its builder registers them; for costs, without torch."""

from typing import Literal

from lengthwise.core.pipeline_config import PipelineConfig
from lengthwise.core.specs import ModelSpec

Unit = Literal["input", "layer", "output"]
"""Kinds of units, whose weights move together."""
Shapes = dict[str, tuple[int, int]]
"""Rows and columns of parameters by the last part of their names; vectors have one column."""


def unit_shapes(spec: ModelSpec, unit: Unit) -> Shapes:
    """Parameters of a unit; a head that is tied to the embedding belongs to the input alone."""
    return {"input": _input_shapes, "layer": _layer_shapes, "output": _output_shapes}[unit](spec)


def unit_size(spec: ModelSpec, unit: Unit) -> int:
    """Number of elements of a unit."""
    return sum(rows * columns for rows, columns in unit_shapes(spec, unit).values())


def stage_unit_sizes(spec: ModelSpec, scheme: PipelineConfig, stage: int) -> list[int]:
    """Number of elements of each unit that a stage with whole weights holds, in order; of a tied embedding its copy."""
    layers = [unit_size(spec, "layer")] * scheme.stage_layers[stage]
    is_last, has_copy = stage == scheme.num_stages - 1, spec.tied_embeddings and stage > 0
    before = [unit_size(spec, "input")] if stage == 0 else [spec.vocab_size * spec.hidden_size] * (is_last and has_copy)
    return [*before, *layers, *([unit_size(spec, "output")] if is_last else [])]


def _input_shapes(spec: ModelSpec) -> Shapes:
    """Parameters before the first layer."""
    hidden = spec.hidden_size
    shapes = {"embedding": (spec.vocab_size, hidden)}
    if spec.max_positions:
        shapes["position"] = (spec.max_positions, hidden)
    if spec.family == "bert":
        shapes |= {"token_type": (2, hidden), "embedding_norm": (hidden, 1), "embedding_norm_bias": (hidden, 1)}
    return shapes


def _layer_shapes(spec: ModelSpec) -> Shapes:
    """Parameters of one layer."""
    hidden, rows, columns = spec.hidden_size, spec.num_heads * spec.head_size, spec.ffn_columns
    all_biases, gated = spec.has_all_biases, spec.gated_ffn
    shapes: dict[str, tuple[int, int] | None] = {
        "attention_norm": (hidden, 1),
        "attention_norm_bias": (hidden, 1) if all_biases else None,
        "qkv": (spec.qkv_size, hidden),
        "qkv_bias": (spec.qkv_size, 1) if spec.qkv_bias else None,
        "proj": (rows, hidden),
        "proj_bias": (hidden, 1) if all_biases else None,
        "ffn_norm": (hidden, 1),
        "ffn_norm_bias": (hidden, 1) if all_biases else None,
        "gate": (columns, hidden) if gated else None,
        "up": (columns, hidden),
        "up_bias": (columns, 1) if all_biases else None,
        "down": (columns, hidden),
        "down_bias": (hidden, 1) if all_biases else None,
    }
    return {name: shape for name, shape in shapes.items() if shape is not None}


def _output_shapes(spec: ModelSpec) -> Shapes:
    """Parameters behind the last layer."""
    hidden = spec.hidden_size
    if spec.family == "bert":
        shapes = {"transform": (hidden, hidden), "transform_bias": (hidden, 1)}
        shapes |= {"transform_norm": (hidden, 1), "transform_norm_bias": (hidden, 1)}
    else:
        shapes = {"final_norm": (hidden, 1)} | ({"final_norm_bias": (hidden, 1)} if spec.has_all_biases else {})
    if not spec.tied_embeddings:
        shapes["head"] = (spec.vocab_size, hidden)
    return shapes | ({"output_bias": (spec.vocab_size, 1)} if spec.family == "bert" else {})
