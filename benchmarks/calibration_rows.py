"""Public measurements of training: rows of ``public_measurements.csv`` and Hydraulis' rows, from its published fits."""

import csv
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from calibration_models import DEVICE_OF, MODELS
from calibration_run import Row
from hydraulis_cost import TABLES, PublishedCost

from lengthwise.core.device_spec import DEVICES
from lengthwise.core.pipeline_config import Method, PipelineConfig, uniform_scheme
from lengthwise.core.specs import ModelSpec, model_preset

FILE = Path(__file__).parent / "public_measurements.csv"
CONTRADICTED = 0.10
"""How much faster a run that should be no faster may be before the slower one counts as disturbed."""


def read_rows(*, with_speed: bool = True) -> list[Row]:
    """All rows of the table, and Hydraulis' fits at lengths of 8K and 32K.

    ``with_speed``: none but those whose speed was measured.
    """
    with FILE.open() as file:
        rows = [_row(fields) for fields in csv.DictReader(file)]
    rows = [row for row in rows if row.tokens_per_s or not with_speed]
    return [*rows, *(row for name in TABLES for row in _hydraulis_rows(name))]


def why_not_scored(row: Row, rows: Sequence[Row]) -> str:
    """Why no law could predict the row beside its own table, or what it measures is no training; empty: neither."""
    if row.system == "hydraulis":
        return "a fit of profiled micro-batches, no training run: without updates, data and other ranks to wait for"
    if row.system == "nanotron" and row.scheme.num_stages > 1:
        return "its stages send two messages about every tensor before it, which the host waits for"
    if (longer := row.above_chord(rows)) > CONTRADICTED:
        return f"{100 * longer:.0f} % longer a token than between its own table's shorter and longer runs"
    if row.is_forced(rows):
        return "one sequence is more tokens than its own table gives a micro-batch where it could"
    faster = max(other.tokens_per_s for other in rows if row.should_be_as_fast_as(other)) / row.tokens_per_s - 1
    if faster > CONTRADICTED:
        return f"its own table has it {100 * faster:.0f} % faster with as many devices or more, none better"
    return ""


def _scheme(fields: dict[str, str], model: ModelSpec, host: frozenset[str]) -> PipelineConfig:
    """How ranks share a sequence: by tensors as Megatron, else by tokens as a ring, or Ulysses where that is ALST's."""
    tensor, context = int(fields["tensor"] or 1), int(fields["context"] or 1)
    method = Method.ULYSSES if fields["system"] == "alst" else Method.RING
    method = Method.MEGATRON_TS if tensor > 1 else method if context > 1 else Method.DENSE
    head_layers = 0.0
    if fields["system"] == "nanotron":  # stages of as many weights, the head's counted
        head_layers = model.hidden_size * model.vocab_size / model.layer_matmul_params
    recomputed = {"all": model.num_layers, "half": model.num_layers // 2}.get(fields["recompute"], 0)
    return uniform_scheme(
        model.num_layers, degree=tensor if tensor > 1 else context, stages=int(fields["stages"] or 1), method=method,
        recomputed=recomputed, offloaded=model.num_layers if "activations" in host else 0,
        tile_tokens=model.hidden_size if fields["tiled"] else 0, head_layers=head_layers,
    )  # fmt: skip


def _label(fields: dict[str, str]) -> str:
    shared = [
        f"{fields[name]} {word}"
        for name, word in (("tensor", "by tensors"), ("context", "by tokens"), ("stages", "stages"))
        if fields[name]
    ]
    words = [
        f"{fields['model']}, {int(fields['length']):,} x {fields['micro_batch']}",
        f"recompute {fields['recompute']}", fields["pointwise"], *shared,
        f"{fields['host'].replace(' ', ', ')} on the host" * bool(fields["host"]), "tiled" * bool(fields["tiled"]),
        "" if fields["system"] in ("trl", "automodel") or not fields["loss"] else f"loss {fields['loss']}",
    ]  # fmt: skip
    return ", ".join(word for word in words if word)


def _row(fields: dict[str, str]) -> Row:
    model, length = MODELS[fields["model"]], int(fields["length"])
    host = frozenset(fields["host"].split())
    scheme = _scheme(fields, model, host)
    return Row(
        system=fields["system"],
        device=DEVICE_OF.get(fields["device"]) or DEVICES[fields["device"]],
        num_devices=int(fields["gpus"]),
        label=_label(fields),
        model=model,
        scheme=scheme,
        lengths=(length,) * int(fields["micro_batch"]),
        accumulation=int(fields["accumulation"]),
        sharding=fields["sharding"] or "fsdp",
        reduced_bytes={"bfloat16": 2, "float32": 4}[fields["reduced_in"]],
        is_unfused=fields["pointwise"] == "unfused",
        tokens_per_s=float(fields["tokens_per_s"] or 0),
        source=fields["source"],
        attention=fields["attention"],
        is_attention_repeated=fields["recompute"] == "attention",
        context=int(fields["context"] or 1) if fields["tensor"] else 1,
        chunks=int(fields["chunks"] or 1),
        is_overlapped=bool(fields["overlap"]),
        host=host,
        memory_gib=float(fields["memory_gib"] or 0),
        memory_kind=fields["memory_of"],
        loss=fields["loss"] or "whole",
        assumed=fields["assumed"],
    )


def _hydraulis_rows(name: str) -> list[Row]:
    published, rows = PublishedCost(name), []
    model = replace(model_preset(name), vocab_size=published.table.vocab_size)
    for degree, stages in published.table.fits_ms:
        method = Method.MEGATRON_TS if degree > 1 else Method.DENSE
        scheme = uniform_scheme(model.num_layers, degree=degree, stages=stages, method=method)
        for length in (8192, 32768):
            measured_s = published.time_s((length,), scheme) * stages
            rows.append(
                Row(
                    system="hydraulis",
                    device=DEVICES["A800-80GB"],
                    num_devices=64,
                    label=f"{name}, {length:,}, {scheme.name}",
                    model=model,
                    scheme=scheme,
                    lengths=(length,),
                    accumulation=1,
                    sharding="none",
                    reduced_bytes=0,
                    is_unfused=False,
                    tokens_per_s=length / degree / stages / measured_s,
                    source="8",
                )
            )
    return rows
