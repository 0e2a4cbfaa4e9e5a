"""The words that a setting may be: each enumeration of configuration files and of ``prepare``, spelt once."""

from typing import Annotated, Any, Literal, get_args

from pydantic import PlainValidator

from lengthwise.core.plugins import POLICIES, is_label, registered

PolicyName = Literal[
    "padded", "static", "bucket", "packed", "hotspa", "dcp-inter", "dcp-intra", "paradyse", "hydraulis", "auto"
]


def _check_policy(name: Any) -> Any:
    """``name``, if it is a policy of ours, MODULE:FUNCTION, or one that an installed package registers."""
    words = get_args(PolicyName)
    if not isinstance(name, str) or not (name in words or is_label(name) or name in registered(POLICIES)):
        others = "".join(f", {other!r}" for other in registered(POLICIES))
        raise ValueError(f"Input should be {', '.join(map(repr, words))}{others} or MODULE:FUNCTION of your own")
    return name


Policy = Annotated[PolicyName | str, PlainValidator(_check_policy)]
OverLength = Literal["error", "drop", "truncate", "split"]
OrderName = Literal["shuffled", "corpus", "sorted", "curriculum", "windowed"]
PacingName = Literal["linear", "root", "step", "natural"]
OptimizerName = Literal["adamw", "sgd", "adafactor"]
LrSchedule = Literal["constant", "cosine", "linear"]
LrRule = Literal["none", "linear", "sqrt"]
BatchSize = Literal["tokens", "sequences", "targets"]
MethodName = Literal[
    "random", "dense", "megatron_ts", "megatron_cz", "ulysses_z", "colossal_z", "metp", "ulysses", "ring",
    "ulysses_ring", "all_gather",
]  # fmt: skip
SharingMethod = Literal[
    "megatron_ts", "megatron_cz", "ulysses_z", "colossal_z", "metp", "ulysses", "ring", "ulysses_ring", "all_gather"
]
SequenceMethod = Literal["ulysses", "ring", "ulysses_ring", "all_gather"]
Recompute = Literal["auto", "none", "all"]
Offload = Literal["auto", "none", "all"]
ShardGradients = Literal["none", "auto", "all"]
ZeroBubbleName = Literal["none", "auto", "all"]
SlicesName = Literal["none", "auto"]
PipelineTime = Literal["flow-shop", "max-times-count"]
PipelineSchedule = Literal["1f1b", "gpipe"]
CostFit = Literal["fitted", "hybrid"]
Implementation = Literal["auto", "lengthwise", "transformers"]
Dtype = Literal["float32", "bfloat16", "float16", "float64"]
GradientDtype = Literal["master", "compute"]
DeviceName = Literal["auto", "cpu", "cuda"]
TrainingObjective = Literal["next-token", "masked", "every-token"]
Packing = Literal["auto", "always", "never"]
HeldWeights = Literal["auto", "whole", "by-layer"]
StatePlace = Literal["auto", "device", "host"]
