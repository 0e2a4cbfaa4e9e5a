"""Schemes and micro-batches of a plan as JSON, and back."""

from typing import Any

from lengthwise.core.batch import Pack
from lengthwise.core.pipeline_config import Method, PipelineConfig, WeightPlacement
from lengthwise.core.planned_micro_batch import OVERRIDES, PlannedMicroBatch, PlannedSlice
from lengthwise.core.token_placement import Piece

_FLAGS = ("keep_attention", "shard_gradients", "zero_bubble")


def scheme_to_json(scheme: PipelineConfig) -> dict[str, Any]:
    """A scheme as a JSON object; what it does not use is left out."""
    return {
        "degree": scheme.degree,
        "stage_layers": list(scheme.stage_layers),
        "methods": [str(method) for method in scheme.methods],
        "recompute": [int(flag) for flag in scheme.recompute],
        "weights": str(scheme.weights),
        **({"offload": [int(flag) for flag in scheme.offload]} if scheme.offload else {}),
        **({"tile_tokens": scheme.tile_tokens} if scheme.tile_tokens else {}),
        **({"head_groups": scheme.head_groups} if scheme.head_groups > 1 else {}),
        **({"slices": scheme.slices} if scheme.slices > 1 else {}),
        **{name: True for name in _FLAGS if getattr(scheme, name)},
    }


def scheme_from_json(document: dict[str, Any]) -> PipelineConfig:
    """The scheme that :func:`scheme_to_json` wrote."""
    return PipelineConfig(
        degree=document["degree"],
        stage_layers=tuple(document["stage_layers"]),
        methods=tuple(Method(method) for method in document["methods"]),
        recompute=tuple(bool(flag) for flag in document["recompute"]),
        weights=WeightPlacement(document["weights"]),
        offload=tuple(bool(flag) for flag in document.get("offload", ())),
        tile_tokens=document.get("tile_tokens", 0),
        head_groups=document.get("head_groups", 1),
        slices=document.get("slices", 1),
        **dict[str, Any]((name, bool(document.get(name))) for name in _FLAGS),
    )


def micro_batch_to_json(micro_batch: PlannedMicroBatch) -> dict[str, Any]:
    """A micro-batch as a JSON object."""
    pack, methods, recompute = micro_batch.pack, micro_batch.methods, micro_batch.recompute
    return {
        "ids": list(pack.ids),
        "lengths": list(pack.lengths),
        **{name: getattr(pack, name) for name in ("padded_to", "rows", "filler")},
        "time_s": micro_batch.time_s,
        "comm_s": micro_batch.comm_s,
        "peak_bytes": micro_batch.peak_bytes,
        "methods": None if methods is None else [str(method) for method in methods],
        "recompute": None if recompute is None else [int(flag) for flag in recompute],
        **({} if micro_batch.offload is None else {"offload": [int(flag) for flag in micro_batch.offload]}),
        **{name: int(value) for name in OVERRIDES[3:] if (value := getattr(micro_batch, name)) is not None},
        **({"weights_s": micro_batch.weights_s} if micro_batch.weights_s else {}),
        **(
            {"slices": [[tokens, float(time_s)] for tokens, time_s in micro_batch.slices]} if micro_batch.slices else {}
        ),
        **(
            {"placement": [list(map(list, pieces)) for pieces in micro_batch.placement]}
            if micro_batch.placement
            else {}
        ),
    }


def micro_batch_from_json(document: dict[str, Any]) -> PlannedMicroBatch:
    """The micro-batch that :func:`micro_batch_to_json` wrote."""
    methods, recompute = document["methods"], document["recompute"]
    return PlannedMicroBatch(
        pack=Pack(
            ids=tuple(document["ids"]),
            lengths=tuple(document["lengths"]),
            padded_to=document["padded_to"],
            rows=document.get("rows", 0),
            filler=document.get("filler", 0),
        ),
        time_s=document["time_s"],
        comm_s=document["comm_s"],
        peak_bytes=document["peak_bytes"],
        methods=None if methods is None else tuple(Method(method) for method in methods),
        recompute=None if recompute is None else tuple(bool(flag) for flag in recompute),
        offload=None if (offload := document.get("offload")) is None else tuple(bool(flag) for flag in offload),
        tile_tokens=document.get("tile_tokens"),
        head_groups=document.get("head_groups"),
        weights_s=document.get("weights_s", 0.0),
        keep_attention=None if (keep := document.get("keep_attention")) is None else bool(keep),
        slices=tuple(PlannedSlice(*values) for values in document.get("slices", ())),
        placement=tuple(tuple(Piece(*piece) for piece in pieces) for pieces in document.get("placement", ())),
    )
