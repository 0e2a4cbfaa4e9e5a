"""Check every value of a plan's JSON document, so that a hand-written plan is refused by field before it executes.

Types are exact: true is not a number, 3.0 is not an id. Bounds are far beyond any sensible plan and far below what
would exhaust memory or turn a number into infinity.
"""

from collections.abc import Set
from typing import Any

from lengthwise.core.errors import InputError
from lengthwise.core.lengths import MOST_TOKENS
from lengthwise.core.lr_scaling import MAX_LR_FACTOR
from lengthwise.core.pipeline_config import Method, WeightPlacement
from lengthwise.core.read_file import brief
from lengthwise.core.specs import MAX_DEVICES

MAX_PACK_TOKENS = 1 << 32
"""Tokens that one micro-batch computes, padding included."""
MAX_LAYERS = 1 << 16
MAX_BYTES = 1 << 60
MAX_SECONDS = 1e12
MAX_ID = (1 << 62) - 1
ROUNDING = 1e-6
"""Relative difference of seconds that were rounded where they were written."""

_PLAN = {
    "schema_version", "step", "policy", "pipelines", "schemes", "loss_normaliser", "update_s", "time_s",
    "lower_bound_s", "lr_factor", "switch_s",
}  # fmt: skip
_SCHEME = {"degree", "stage_layers", "methods", "recompute", "weights"}
_PIPELINE = {"ranks", "phase", "scheme", "state_bytes", "micro_batches"}
_MICRO_BATCH = {"ids", "lengths", "padded_to", "time_s", "comm_s", "peak_bytes", "methods", "recompute"}
_OPTIONAL = {"rows", "filler", "weights_s", "slices", "placement"}
_ACTIVATIONS = {"offload", "tile_tokens", "head_groups", "keep_attention"}
MAX_HEAD_GROUPS = 4096
MAX_SLICES = 4096
_METHODS, _WEIGHTS = {str(method) for method in Method}, {str(weights) for weights in WeightPlacement}


def check_plan_values(document: Any) -> None:
    """Check the values of a plan's document; what they mean together is checked when the plan is made.

    Raises:
        InputError: a value is missing, unknown, of another type or out of bounds; the message names the field.
    """
    _check_keys(document, "plan", _PLAN, optional={"digest", "num_devices", "hidden_update_s"})
    _check_int(document["step"], "step", 0, MAX_ID)
    if not isinstance(document["policy"], str) or len(document["policy"]) > 100 or not document["policy"].isprintable():
        raise _wrong("policy", "the name of a policy", document["policy"])
    digest = document.get("digest", "")
    if not isinstance(digest, str) or len(digest) > 100:
        raise _wrong("digest", "sixteen hex digits", digest)
    _check_int(document.get("num_devices", 1), "num_devices", 1, MAX_DEVICES)
    _check_int(document["loss_normaliser"], "loss_normaliser", 1, MAX_BYTES)
    for name in ("update_s", "time_s", "lower_bound_s", "switch_s"):
        _check_seconds(document[name], name)
    _check_seconds(document.get("hidden_update_s", 0.0), "hidden_update_s")
    factor = document["lr_factor"]
    if type(factor) not in (int, float) or not 0 < factor <= MAX_LR_FACTOR:
        raise _wrong("lr_factor", f"a number above 0 and at most {MAX_LR_FACTOR:g}", factor)
    schemes = document["schemes"]
    _check_list(schemes, "schemes")
    if not schemes:
        raise InputError("schemes is empty; pipelines name one each")
    for number, scheme in enumerate(schemes):
        _check_scheme(scheme, f"schemes[{number}]")
    _check_list(document["pipelines"], "pipelines")
    for number, pipeline in enumerate(document["pipelines"]):
        _check_pipeline(pipeline, f"pipelines[{number}]", num_schemes=len(schemes))


def check_contradictions(document: dict[str, Any]) -> None:
    """Check that the checked values of a plan which was written by hand do not contradict one another.

    Raises:
        InputError: a sequence is computed twice, a part of a time is longer than the whole, the bound is above the time
            that it bounds, or a single phase is switched; the message names the field.
    """
    bound_s, time_s = document["lower_bound_s"], document["time_s"]
    if bound_s > time_s * (1 + ROUNDING):
        raise InputError(f"lower_bound_s = {bound_s:g} is above time_s = {time_s:g}; no time is below its lower bound")
    if document["switch_s"] and all(pipeline["phase"] == 0 for pipeline in document["pipelines"]):
        raise InputError(f"switch_s = {document['switch_s']:g}, and a step of one phase switches nothing; set it to 0")
    places: dict[int, str] = {}
    for number, pipeline in enumerate(document["pipelines"]):
        for place, micro_batch in enumerate(pipeline["micro_batches"]):
            where = f"pipelines[{number}].micro_batches[{place}]"
            if micro_batch["comm_s"] > micro_batch["time_s"] * (1 + ROUNDING):
                raise InputError(
                    f"{where}: comm_s = {micro_batch['comm_s']:g} is a part of time_s = {micro_batch['time_s']:g} and "
                    "above it"
                )
            for name in micro_batch["ids"]:
                if name in places:
                    raise InputError(f"{where}.ids has sequence {name}, which {places[name]} computes in the same step")
                places[name] = where


def _check_scheme(scheme: Any, where: str) -> None:
    _check_keys(scheme, where, _SCHEME, optional={"shard_gradients", "zero_bubble", "slices"} | _ACTIVATIONS)
    for name in ("shard_gradients", "zero_bubble"):
        _check_flag(scheme.get(name, False), f"{where}.{name}")
    _check_int(scheme["degree"], f"{where}.degree", 1, MAX_DEVICES)
    _check_int(scheme.get("slices", 1), f"{where}.slices", 1, MAX_SLICES)
    _check_ints(scheme["stage_layers"], f"{where}.stage_layers", 1, MAX_LAYERS)
    if sum(scheme["stage_layers"]) > MAX_LAYERS:
        raise InputError(f"{where}.stage_layers holds more than {MAX_LAYERS:,} layers")
    _check_words(scheme["methods"], f"{where}.methods", _METHODS)
    _check_flags(scheme["recompute"], f"{where}.recompute")
    _check_activations(scheme, where)
    if not isinstance(scheme["weights"], str) or scheme["weights"] not in _WEIGHTS:
        raise _wrong(f"{where}.weights", f"one of {', '.join(sorted(_WEIGHTS))}", scheme["weights"])


def _check_pipeline(pipeline: Any, where: str, *, num_schemes: int) -> None:
    _check_keys(pipeline, where, _PIPELINE)
    _check_ints(pipeline["ranks"], f"{where}.ranks", 0, MAX_DEVICES - 1)
    _check_int(pipeline["phase"], f"{where}.phase", 0, MAX_LAYERS)
    _check_int(pipeline["scheme"], f"{where}.scheme", 0, num_schemes - 1)
    _check_int(pipeline["state_bytes"], f"{where}.state_bytes", 0, MAX_BYTES)
    _check_list(pipeline["micro_batches"], f"{where}.micro_batches")
    for number, micro_batch in enumerate(pipeline["micro_batches"]):
        try:
            _check_micro_batch(micro_batch)
        except InputError as error:  # named here, as a plan has thousands that are right
            raise InputError(f"{where}.micro_batches[{number}]{error}") from None


def _check_micro_batch(micro_batch: Any) -> None:
    _check_keys(micro_batch, "", _MICRO_BATCH, optional=_OPTIONAL | _ACTIVATIONS)
    ids, lengths = micro_batch["ids"], micro_batch["lengths"]
    _check_ints(ids, ".ids", 0, MAX_ID)
    _check_ints(lengths, ".lengths", 1, MOST_TOKENS)
    padded_to, rows, filler = micro_batch["padded_to"], micro_batch.get("rows", 0), micro_batch.get("filler", 0)
    _check_int(padded_to, ".padded_to", 0, MOST_TOKENS)
    _check_int(rows, ".rows", 0, MAX_ID)
    _check_int(filler, ".filler", 0, MOST_TOKENS)
    num_tokens = (padded_to * max(rows, len(lengths)) if padded_to else sum(lengths)) + filler
    if num_tokens > MAX_PACK_TOKENS:
        raise InputError(
            f": lengths, padded_to={padded_to:,}, rows={rows:,} and filler={filler:,} make {num_tokens:,} tokens, over "
            f"the limit of {MAX_PACK_TOKENS:,} tokens of a micro-batch"
        )
    _check_seconds(micro_batch["time_s"], ".time_s")
    _check_seconds(micro_batch["comm_s"], ".comm_s")
    _check_seconds(micro_batch.get("weights_s", 0.0), ".weights_s")
    _check_int(micro_batch["peak_bytes"], ".peak_bytes", 0, MAX_BYTES)
    if "slices" in micro_batch:
        _check_slices(micro_batch["slices"])
    if "placement" in micro_batch:
        _check_placement(micro_batch["placement"])
    if micro_batch["methods"] is not None:
        _check_words(micro_batch["methods"], ".methods", _METHODS)
    if micro_batch["recompute"] is not None:
        _check_flags(micro_batch["recompute"], ".recompute")
    _check_activations(micro_batch, "")


def _check_slices(slices: Any) -> None:
    """Check the slices of a micro-batch, each a number of tokens and of seconds."""
    _check_list(slices, ".slices")
    if len(slices) > MAX_SLICES:
        raise InputError(f".slices: {len(slices):,} of them, over the limit of {MAX_SLICES:,}")
    for place, values in enumerate(slices):
        _check_list(values, f".slices[{place}]")
        if len(values) != 2:
            raise _wrong(f".slices[{place}]", "a number of tokens and of seconds", values)
        _check_int(values[0], f".slices[{place}][0]", 1, MAX_PACK_TOKENS)
        _check_seconds(values[1], f".slices[{place}][1]")


def _check_placement(placement: Any) -> None:
    """Check the pieces of every sequence, each a rank of the stage and a number of tokens."""
    _check_list(placement, ".placement")
    for number, pieces in enumerate(placement):
        _check_list(pieces, f".placement[{number}]")
        for place, piece in enumerate(pieces):
            where = f".placement[{number}][{place}]"
            _check_list(piece, where)
            if len(piece) != 2:
                raise _wrong(where, "a rank of the stage and a number of tokens", piece)
            _check_int(piece[0], f"{where}[0]", 0, MAX_DEVICES - 1)
            _check_int(piece[1], f"{where}[1]", 1, MAX_PACK_TOKENS)


def _check_activations(values: dict[str, Any], where: str) -> None:
    """Check the fields that only schemes and micro-batches with offload or tiles have."""
    if "offload" in values:
        _check_flags(values["offload"], f"{where}.offload")
    _check_int(values.get("tile_tokens", 0), f"{where}.tile_tokens", 0, MAX_PACK_TOKENS)
    _check_int(values.get("head_groups", 1), f"{where}.head_groups", 1, MAX_HEAD_GROUPS)
    _check_flag(values.get("keep_attention", False), f"{where}.keep_attention")


def _check_keys(value: Any, where: str, keys: set[str], *, optional: Set[str] = frozenset()) -> None:
    if type(value) is not dict:
        raise _wrong(where, "an object", value)
    if missing := keys - value.keys():
        raise InputError(f"{where}: it has no {min(missing)!r}")
    if unknown := value.keys() - keys - optional:
        names = ", ".join(sorted(keys | optional))
        raise InputError(f"{where}: unknown field {brief(min(unknown))}; fields are {names}")


def _check_list(value: Any, where: str) -> None:
    if type(value) is not list:
        raise _wrong(where, "a list", value)


def _check_int(value: Any, where: str, minimum: int, maximum: int) -> None:
    if type(value) is not int or not minimum <= value <= maximum:
        raise _wrong(where, f"a whole number from {minimum:,} to {maximum:,}", value)


def _check_ints(values: Any, where: str, minimum: int, maximum: int) -> None:
    _check_list(values, where)
    if not values:
        raise InputError(f"{where} is empty; it needs at least one number")
    if set(map(type, values)) != {int} or min(values) < minimum or max(values) > maximum:
        place, value = next((k, v) for k, v in enumerate(values) if type(v) is not int or not minimum <= v <= maximum)
        raise _wrong(f"{where}[{place}]", f"a whole number from {minimum:,} to {maximum:,}", value)


def _check_seconds(value: Any, where: str) -> None:
    if type(value) not in (int, float) or not 0 <= value <= MAX_SECONDS:
        raise _wrong(where, f"a number of seconds from 0 to {MAX_SECONDS:g}", value)


def _check_words(values: Any, where: str, allowed: set[str]) -> None:
    _check_list(values, where)
    for place, value in enumerate(values):
        if not isinstance(value, str) or value not in allowed:
            raise _wrong(f"{where}[{place}]", f"one of {', '.join(sorted(allowed))}", value)


def _check_flags(values: Any, where: str) -> None:
    _check_list(values, where)
    for place, value in enumerate(values):
        _check_flag(value, f"{where}[{place}]")


def _check_flag(value: Any, where: str) -> None:
    if type(value) not in (int, bool) or value not in (0, 1):
        raise _wrong(where, "0 or 1", value)


def _wrong(where: str, expected: str, value: Any) -> InputError:
    return InputError(f"{where} must be {expected}, not {brief(value)}")
