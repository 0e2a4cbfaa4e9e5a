"""Lengths, models, clusters, policies and methods by name, checked, for commands and functions alike."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lengthwise.core.arguments import check_arguments
from lengthwise.core.device_file import resolve_device
from lengthwise.core.errors import InfeasibleError, InputError, Setting
from lengthwise.core.lengths import LengthIndex, read_lengths
from lengthwise.core.pipeline_config import Method
from lengthwise.core.read_file import brief
from lengthwise.core.specs import MODELS, ClusterSpec, ModelSpec, cluster_preset
from lengthwise.core.wording import nearest, whole_number
from lengthwise.data.synthetic import NAMES, synthetic_lengths
from lengthwise.index.source_file import SourceFile
from lengthwise.index.store import open_index
from lengthwise.index.work_units import open_lengths
from lengthwise.plan.space.problem import PlanningProblem

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

SYNTHETIC_SEQUENCES = 100_000
METHODS = tuple(str(method) for method in Method if method is not Method.DENSE)
"""Names of the methods that share a layer among devices."""
MAX_SIZES = 16
"""Sizes of a cluster that one table compares."""
MOST_DEVICES = 16_384
"""All policies are prepared and plan a few steps of so many devices in about a minute."""


@dataclass(frozen=True, kw_only=True)
class Spelling:
    """How errors name settings to whoever gave them: as options of a command, or as arguments of a function."""

    is_option: bool

    def __call__(self, setting: str | Setting) -> str:
        """The setting ``max_length`` as it is given; those that only configurations have say so."""
        if isinstance(setting, Setting):
            if setting not in _ARGUMENTS:
                return f"{setting.value} (of configurations alone)"
            setting = _ARGUMENTS[setting]
        return f"--{setting.removesuffix('_gib').replace('_', '-')}" if self.is_option else setting


COMMAND_LINE, PYTHON = Spelling(is_option=True), Spelling(is_option=False)
_ARGUMENTS = {
    Setting.MAX_LENGTH: "max_length",
    Setting.OVER_LENGTH: "over_length",
    Setting.TOKENS_PER_STEP: "tokens_per_step",
    Setting.POLICY: "policies",
    Setting.MAX_DEGREE: "max_degree",
    Setting.MAX_STAGES: "max_stages",
    Setting.METHOD: "methods",
    Setting.METHODS: "methods",
    Setting.RECOMPUTE: "recompute",
    Setting.OFFLOAD: "offload",
    Setting.OFFLOAD_STATE: "offload",
    Setting.SHARD_GRADIENTS: "shard_gradients",
    Setting.SLICES: "slices",
    Setting.HOST_MEMORY_GIB: "host_memory_gib",
    Setting.PROFILE: "profile",
    Setting.DTYPE: "dtype",
}
"""The settings that `lengthwise.compare` and the command of that name have too."""


def check_longest(problem: PlanningProblem, lengths: LengthIndex) -> None:
    """Raise ``InfeasibleError`` if the longest sequence fits under no scheme."""
    kind = problem.leanest
    if lengths.max_length <= kind.max_tokens:
        return
    where = lengths.number_of(int(np.argmax(lengths.lengths)))
    more = (
        f", more or larger devices, or allow more schemes with {Setting.MAX_DEGREE}, {Setting.MAX_STAGES}, "
        f"{Setting.METHOD} and {Setting.RECOMPUTE}=auto"
    )
    raise InfeasibleError(
        f"sequence {where} ({lengths.max_length:,} tokens) {problem.needs(kind, lengths.max_length)} "
        f"Give {Setting.MAX_LENGTH}={kind.max_tokens} or less"
        f"{'' if problem.is_limited_by_settings(kind, lengths.max_length) else more}.",
        what=f"sequence {where}", value=lengths.max_length, limit=kind.max_tokens, unit="tokens",
    )  # fmt: skip


def check_positions(model: str, max_positions: int, *, longest: int) -> None:
    """Raise ``InputError`` if a sequence has more tokens than a model has learned positions, if it has any."""
    if 0 < max_positions < longest:
        raise InputError(
            f"the longest sequence has {longest:,} tokens, model {model} has learned positions for {max_positions:,}; "
            f"set {Setting.MAX_LENGTH}={max_positions} and {Setting.OVER_LENGTH} to what shall happen to longer ones "
            "(split, truncate, drop), or train a model with rotary positions"
        )


def open_source(source: str, *, seed: int, spelling: Spelling = COMMAND_LINE) -> LengthIndex:
    """The lengths in a .npy file (memory-mapped), of an index, or drawn from a distribution with a name.

    Args:
        source: the file, the folder or the name.
        seed: of the lengths that are drawn.
        spelling: how errors name the setting.

    Raises:
        InputError: ``source`` is none of them; the message suggests the nearest name.
    """
    setting = spelling("lengths")
    if source in NAMES:
        return LengthIndex(lengths=synthetic_lengths(source, SYNTHETIC_SEQUENCES, seed))
    path = Path(source)
    try:
        is_folder, is_file = path.is_dir(), path.is_file()
    except (OSError, ValueError) as error:  # such as a name that is too long, or holds a NUL byte
        reason = error.strerror if isinstance(error, OSError) else error
        raise InputError(f"{setting} {brief(source)[1:-1]}: {reason}") from None
    try:
        if is_folder and source:
            return open_index(path).lengths
        if is_file:
            file = SourceFile(path=source, name=source, size=path.stat().st_size, mtime_ns=0)
            return LengthIndex(lengths=open_lengths(file))
    except InputError as error:
        raise InputError(f"{setting} {source}: {error}") from None
    raise InputError(
        f"{setting} {brief(source)[1:-1]}: no .npy file, no index folder and no synthetic distribution of that name; "
        f"{nearest(source, NAMES)}"
    )


def find_lengths(
    lengths: "str | Path | LengthIndex | ArrayLike", *, seed: int, spelling: Spelling = PYTHON
) -> LengthIndex:
    """Lengths as an array, as an index in memory, or by the name that ``open_source`` takes.

    Raises:
        InputError: they are none of these, or no lengths.
    """
    if isinstance(lengths, LengthIndex):
        return lengths
    if isinstance(lengths, str | Path):
        return open_source(str(lengths), seed=seed, spelling=spelling)
    return read_lengths(lengths)


def find_model(model: str | Path | ModelSpec) -> ModelSpec:
    """The sizes of a model by the name of its preset or its Hugging Face folder of any family, or as they are.

    Raises:
        InputError: there is no such preset and no such folder, or the folder's config.json is of layers without costs.
    """
    if isinstance(model, ModelSpec):
        return model
    check_arguments({"model": str | Path}, {"model": model})
    if str(model) in MODELS:
        return MODELS[str(model)]
    if os.path.isdir(model):  # unlike Path.is_dir, also of names that are too long
        from lengthwise.session.priced_model import read_compared_spec

        return read_compared_spec(Path(model))
    suggestion = "" if "/" in str(model) else f"; {nearest(str(model), MODELS)}"
    raise InputError(
        f"no model preset {brief(str(model))} and no folder of that name; give the folder that holds the model's "
        f"config.json{suggestion}"
    )


def find_cluster(
    cluster: str | ClusterSpec, memory_margin: float | None = None, host_memory_gib: float | None = None
) -> ClusterSpec:
    """The cluster of a name such as ``8x8xH100-80GB``, or a given one, whose memory is used to the full by default.

    Raises:
        InputError: there is no such device, the name has another form, or the margin is no share.
    """
    if memory_margin is not None and not 0 <= memory_margin < 1:
        raise InputError(f"memory_margin is {memory_margin:g}; it is a share of a device's memory, from 0 to below 1")
    if not isinstance(cluster, ClusterSpec):
        check_arguments({"cluster": str}, {"cluster": cluster})
        return _with_margin(cluster_preset(cluster, host_memory_gib=host_memory_gib), memory_margin)
    if host_memory_gib is not None:
        cluster = replace(cluster, device=cluster.device.with_host_memory(host_memory_gib))
    return cluster if memory_margin is None else _with_margin(cluster, memory_margin)


def _with_margin(cluster: ClusterSpec, margin: float | None = None) -> ClusterSpec:
    return replace(cluster, device=cluster.device.with_margin(margin))


def make_cluster(
    device: str,
    num_devices: int,
    *,
    devices_per_node: int | None = None,
    memory_gib: float | None = None,
    memory_margin: float | None = None,
    host_memory_gib: float | None = None,
) -> ClusterSpec:
    """Nodes of ``devices_per_node`` devices, or of as many as usual, the last of which may have fewer.

    Plans may fill ``memory_gib`` of each, or all that it has but the margin, and ``host_memory_gib`` of the host's.

    Raises:
        InputError: no such device, or none at all.
    """
    try:
        devices_per_node = resolve_device(device).devices_per_node if devices_per_node is None else devices_per_node
    except InputError as error:
        raise InputError(f"--device {brief(device)[1:-1]}: {error}") from None
    if devices_per_node < 1 or num_devices < 1:
        raise InputError(f"--gpus {num_devices} in nodes of {devices_per_node}: at least 1 of each is needed")
    if memory_gib is not None and memory_margin is not None:
        raise InputError(
            f"--memory-margin {memory_margin:g} beside --hbm {memory_gib:g}: plans may fill all of --hbm; leave one out"
        )
    try:
        shape = ClusterSpec.of_devices(num_devices, resolve_device(device), devices_per_node=devices_per_node).shape
        cluster = cluster_preset(f"{shape}x{device}", memory_gib=memory_gib, host_memory_gib=host_memory_gib)
        return cluster if memory_gib is not None else _with_margin(cluster, memory_margin)
    except InputError as error:
        options = {"--hbm": memory_gib, "--host-memory": host_memory_gib}
        named = "".join(f", {option} {gib}" for option, gib in options.items() if gib is not None)
        raise InputError(f"--gpus {num_devices}{named}: {error}") from None


def parse_counts(words: str, option: str) -> list[int]:
    """Whole numbers from ``64,128``; each once, in the order given."""
    counts = [whole_number(part.strip()) for part in words.split(",")]
    if not all(counts) or len(counts) > MAX_SIZES:
        raise InputError(
            f"{option} {brief(words)} is not a list of up to {MAX_SIZES} numbers of devices, each at "
            "least 1, such as 64 or 64,128,256"
        )
    return list(dict.fromkeys(count for count in counts if count))


def clusters_of(
    device: str,
    gpus: str,
    *,
    devices_per_node: int | None = None,
    memory_gib: float | None = None,
    memory_margin: float | None = None,
    host_memory_gib: float | None = None,
) -> list[ClusterSpec]:
    """Clusters of the sizes in ``64,128``, as ``make_cluster`` makes each, none of them too large to compare.

    Raises:
        InputError: that is no such list, one cannot be made, or comparing policies on it would take too long.
    """
    counts = parse_counts(gpus, "--gpus")
    if max(counts) > MOST_DEVICES:
        raise InputError(
            f"--gpus {max(counts)}: at most {MOST_DEVICES:,} devices are compared, which takes a minute; for more, "
            f"plan and simulate one policy (lengthwise simulate CONFIG plan.policy=NAME cluster.name=NxMx{device})"
        )
    return [
        make_cluster(
            device,
            count,
            devices_per_node=devices_per_node,
            memory_gib=memory_gib,
            memory_margin=memory_margin,
            host_memory_gib=host_memory_gib,
        )
        for count in counts
    ]


def parse_names(words: str | None, known: Sequence[str], option: str) -> list[str]:
    """Names from ``a,b``, each once, checked; all that are known where none is given.

    Raises:
        InputError: a name is not known; the message suggests the nearest.
    """
    if words is None:
        return list(known)
    return check_names(split_names(words), known, option)


def split_names(words: str) -> list[str]:
    """The names in ``a,b``."""
    return [part.strip() for part in words.split(",")]


def check_names(names: Sequence[str], known: Sequence[str], setting: str) -> list[str]:
    """The names, each once.

    Raises:
        InputError: there is none, or one is not known; the message says of which ``setting``, and suggests the nearest.
    """
    if not names:
        raise InputError(f"{setting} is an empty list; name at least one, such as {known[0]}, or leave it out")
    for name in names:
        if not name:
            raise InputError(f"{setting}: a name is empty; give some of {', '.join(known)}, or leave {setting} out")
        if name not in known:
            raise InputError(f"{setting} {brief(','.join(names))[1:-1]}: no {brief(name)}; {nearest(name, known)}")
    return list(dict.fromkeys(names))


def parse_methods(words: str | None) -> tuple[Method, ...] | None:
    """Methods from ``ulysses,ring``; None where none is given. Dense is always there, at degree 1."""
    return None if words is None else tuple(map(Method, parse_names(words, METHODS, "--methods")))
