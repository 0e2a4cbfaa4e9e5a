"""The documents that commands print under ``--json``, as models from which their JSON schemas are made.

Every document has ``schema_version``, which grows when a field goes or changes its meaning; fields may be added at any
time.
"""

from dataclasses import fields
from typing import Any, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, create_model

from lengthwise.data.length_stats import LengthStats
from lengthwise.data.sampling_bias import SamplingReport
from lengthwise.report.run_summary import RunSummary
from lengthwise.session.console import SCHEMA_VERSION


class Fields(BaseModel):
    """Part of a document; readers pass over fields that they do not know."""

    model_config = ConfigDict(extra="allow", use_attribute_docstrings=True)


class JsonDocument(Fields):
    """What every document has."""

    schema_version: int = Field(ge=SCHEMA_VERSION, le=SCHEMA_VERSION)


class FailureDocument(JsonDocument):
    """The end of any command that fails, in place of its document."""

    error: str
    exit_code: int
    run_folder: str | None = None
    """The folder of the run that failed; left out where there is none."""


class IndexDocument(JsonDocument):
    """An index that was built, or found up to date, or verified."""

    path: str
    num_sequences: int
    num_tokens: int
    max_length: int
    digest: str
    vocab_size: int
    eos_id: int | None
    dtype: str | None
    has_tokens: bool
    tokenizer: dict[str, Any] | str | None
    ledger: dict[str, Any]
    """What came in and what was left out, with examples."""
    num_loss_tokens: int | None = None
    """The number of tokens that have a loss, where labels or chats say which."""
    unused_columns: list[str] | None = None


def _document_of(
    name: str, kind: type, doc: str, *, base: type[BaseModel] = JsonDocument, without: str = ""
) -> type[Any]:
    """A document with the fields of a dataclass."""
    hints = get_type_hints(kind)
    definitions: dict[str, Any] = {
        field.name: (hints[field.name], ...) for field in fields(kind) if field.name != without
    }
    return create_model(name, __base__=base, __doc__=doc, **definitions)


StatsDocument = _document_of("StatsDocument", LengthStats, "Lengths of a corpus and what they cost, and its `path`.")
SamplingDocument = _document_of("SamplingDocument", SamplingReport, "What an order does to sampling (`--sampling`).")
RunFields: Any = _document_of("RunFields", RunSummary, "The figures of one run.", base=Fields, without="steps")


class AnalyzeDocument(JsonDocument):
    """A metric of every sequence, and how it is distributed."""

    index: str
    name: str
    metric: str
    num_sequences: int
    min: float
    max: float
    mean: float
    quantiles: dict[str, float]
    up_to_date: bool
    num_resumed_blocks: int


class ProfiledPack(Fields):
    """One measured pack."""

    lengths: list[int]
    time_s: float
    kept_bytes: float
    residual: float
    """Measured over fitted time, less 1."""
    parts: dict[str, float] | None
    """Of one layer: `attention_s`, `ffn_s`, `attention_bytes` and `ffn_bytes`."""


class ProfileDocument(JsonDocument):
    """A profile and the fit to it: seconds are a_s l^2 + b_s l for each sequence of l tokens, and c_s for each pack."""

    profile: str
    model: str
    device: str
    dtype: str
    num_ranks: int
    update_s: float
    a_s: float
    b_s: float
    c_s: float
    bytes_per_token: float
    median_error: float
    rows: list[ProfiledPack]
    shared: list[dict[str, Any]]
    """The packs that ranks shared, for each degree and method."""
    links: dict[str, dict[str, float] | None] | None
    """`within` a node and `across` nodes: seconds of a call and bytes per second; null: not measured."""


class SchemeFields(Fields):
    """What one parallel configuration holds."""

    scheme: str
    degree: int
    stages: int
    method: str
    recomputed_layers: int
    offloaded_layers: int
    """Layers whose saved tensors are in host memory between forward and backward."""
    tile_tokens: int
    sharded_gradients: bool
    """Tokens of a feed-forward's tile; 0: all at once."""
    state_gib: float
    max_tokens: int


class RungFields(Fields):
    """The longest sequence with one more thing that frees memory, and what that costs."""

    rung: str
    scheme: str
    max_tokens: int
    time_s: float
    tokens_per_s: float
    host_gib: float
    state_gib: float
    at_tokens: int
    """The longest sequence of the rung before."""
    slowdown: float
    """Seconds of a sequence of `at_tokens` on this rung over those on the rung before."""


class MemoryDocument(JsonDocument):
    """The longest sequence that each scheme holds, and the cheapest scheme for a length."""

    model: str
    num_params: int
    num_layers: int
    cluster: str
    memory_gib: float
    margin_gib: float
    host_memory_gib: float
    longest: SchemeFields
    schemes: list[SchemeFields]
    length: int | None
    cheapest: SchemeFields | None
    fits: list[SchemeFields] | None
    ladder: list[RungFields] | None


class PlanFields(Fields):
    """One plan, as in plans.jsonl; it has a schema version of its own."""

    schema_version: int
    digest: str
    step: int
    policy: str
    loss_normaliser: int
    time_s: float
    lower_bound_s: float
    schemes: list[dict[str, Any]]
    pipelines: list[dict[str, Any]]


class PlanDocument(JsonDocument):
    """The plans of the first steps, and quantiles over them."""

    plans: list[PlanFields]
    summary: dict[str, Any]
    cost_error: dict[str, float] | None
    """`of_times`: the relative error that nine of ten predictions stay within; `of_ratios`: that half of the ratios of
    two do, 0 where it is not known; null: too few measurements are known to say."""
    out: str | None


class SimulateDocument(JsonDocument):
    """Figures over the simulated steps; shares are of all device-seconds."""

    policy: str
    num_steps: int
    num_devices: int
    step_with_other_devices: int | None
    """Of plans of several numbers of devices; ``num_devices`` is the largest."""
    tokens_per_s: float
    step_time_s: float
    idle: float
    compute: float
    communicate: float
    bubble: float
    imbalance: float
    switch: float
    update: float
    padding: float
    gap: float
    gap_median: float
    peak_gib: float
    mfu: float | None
    """Model FLOPs utilization; null: the model or the device is not known."""
    hours: float | None
    """Of the whole training, where --tokens says how long it is."""
    cost: float | None


class DryRunDocument(JsonDocument):
    """One step of some ranks on fake tensors, beside what costs and plan say."""

    model: str
    cluster: str
    policy: str
    num_devices: int
    memory_bytes: int
    """Of a device, as plans may fill it."""
    differences: list[str]
    """What collectives differ in from the proven plan; empty if in nothing."""
    ranks: list[dict[str, Any]]
    """Each with peak_bytes by kind, flops, kernels, collectives, synchronisations, bytes copied to and from the host by
    stream, memory over time, and predicted; of the library's own models also with what it writes of a checkpoint."""


class PolicyFields(Fields):
    """One policy on one cluster; numbers are null where it is refused."""

    policy: str
    num_used: int | None
    """Devices that some step computes on."""
    tokens_per_s: float | None
    step_time_s: float | None
    idle: float | None
    bubble: float | None
    padding: float | None
    gap: float | None
    bound_s: float | None
    """Seconds that no plan of the schemes that the policy may use is faster than, mean over the steps."""
    strategies: list[str] | None
    """The pipelines of each step in words."""
    mfu: float | None
    hours: float | None
    """Of the whole training."""
    cost: float | None
    """Of the whole training, in the currency of ``price_per_hour``."""
    planning_s: float | None
    preparing_s: float | None
    peak_gib: float | None
    time_shares: dict[str, float] | None
    refused: str | None
    """Why it cannot run."""


class ClusterFields(Fields):
    """All policies on one cluster."""

    gpus: int
    cluster: str
    tokens_per_step: int
    token_budget: int
    """Most tokens of a global batch."""
    network_gbit_per_s: float
    link_gbyte_per_s: float
    """Of each device to the others of its node, per direction."""
    tokens: int | None
    """Of the whole training, where that was given."""
    price_per_hour: float | None
    """Of one device; null: not known."""
    policies: list[PolicyFields]


class CompareDocument(JsonDocument):
    """All policies on the same global batches; of a single cluster, its fields stand at the top as well."""

    model: str
    lengths: str
    num_steps: int
    clusters: list[ClusterFields]
    dtype: str
    seed: int
    speed_error: float | None
    """Relative error that nine of ten predicted times stay within; null: not known."""
    profile: str | None
    """The file of measurements that costs are fitted to; null: they come from the data sheet of the device."""
    jitter: float
    overlap: float | None
    """The share of every update that computation hides, in plans as in simulation."""
    search_space: dict[str, Any]
    """Limits of the schemes that policies may use; null: the cluster's."""
    ledger: dict[str, Any]


class ReachDocument(JsonDocument):
    """Under `--reach`: how fast every policy trains steps of sequences that are all as long, and where each ends."""

    model: str
    dtype: str
    clusters: list[dict[str, Any]]
    """Each with cluster, num_devices, the lengths that all policies were asked for, and for each policy what it reached
    (length, tokens_per_s, step_time_s, strategy) and why longer ones are refused."""


class TrainDocument(JsonDocument):
    """A run that has ended well."""

    run_folder: str
    status: dict[str, Any]
    """What `status.json` holds."""


class ReportDocument(JsonDocument):
    """The figures of each run, and where page and trace are."""

    runs: list[RunFields]
    report: str
    trace: str


class DemoDocument(JsonDocument):
    """The figures of each run, and where the page is."""

    runs: list[RunFields]
    report: str


class ExportDocument(JsonDocument):
    """A model that was exported."""

    out: str
    checkpoint: str
    num_params: int


class ConfigDocument(JsonDocument):
    """The resolved configuration; it can be read back as a configuration file."""

    name: str
    seed: int
    data: dict[str, Any]
    model: dict[str, Any]
    cluster: dict[str, Any]
    plan: dict[str, Any]
    optim: dict[str, Any]
    train: dict[str, Any]


class PresetsDocument(JsonDocument):
    """Names of model and device presets (`--presets`)."""

    models: list[str]
    devices: list[str]


DOCUMENTS: dict[str, tuple[type[JsonDocument], ...]] = {
    "demo": (DemoDocument,),
    "index": (IndexDocument,),
    "stats": (StatsDocument, SamplingDocument),
    "analyze": (AnalyzeDocument,),
    "profile": (ProfileDocument,),
    "memory": (MemoryDocument,),
    "plan": (PlanDocument,),
    "simulate": (SimulateDocument,),
    "dryrun": (DryRunDocument,),
    "compare": (CompareDocument, ReachDocument),
    "train": (TrainDocument,),
    "report": (ReportDocument,),
    "export": (ExportDocument,),
    "config": (ConfigDocument, PresetsDocument),
}
"""Command -> the documents that it may print; all may print a ``FailureDocument``."""


def json_schema(command: str) -> dict[str, Any]:
    """The JSON schema of what a command prints, whether it ends well or fails."""
    kinds: tuple[type[JsonDocument], ...] = (*DOCUMENTS[command], FailureDocument)
    schemas = [kind.model_json_schema(ref_template=f"#/$defs/{kind.__name__}/$defs/{{model}}") for kind in kinds]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"lengthwise {command} --json",
        "anyOf": [{"$ref": f"#/$defs/{kind.__name__}"} for kind in kinds],
        "$defs": {kind.__name__: schema for kind, schema in zip(kinds, schemas)},
    }
