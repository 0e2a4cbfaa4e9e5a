"""The cost model of a prepared run: from its profile, measured now or kept from before."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from lengthwise.config.prepare_options import PrepareOptions
from lengthwise.core.cache_folder import cache_folder
from lengthwise.core.errors import InputError
from lengthwise.core.layer_profile import AS_PREPARED, LayerRow, LayerTable, LayerVariant
from lengthwise.core.lengths import LengthIndex
from lengthwise.core.pipeline_config import Method
from lengthwise.core.specs import ClusterSpec
from lengthwise.core.wording import counted
from lengthwise.cost.profiled.dual_layer import DualLayerCost
from lengthwise.runtime.loop.prepared_model import PreparedModel
from lengthwise.runtime.profile.fingerprint import find_table, identity_of, keep_table
from lengthwise.runtime.profile.two_layer_profile import ProfilingEffort, measure
from lengthwise.runtime.profile.validate import check_prediction
from lengthwise.session.state_placement import is_on_host

_log = logging.getLogger("lengthwise")

CHECKED_S = 2.0
"""Seconds of a micro-batch of the whole model that is worth computing to check a prediction."""


def profile_path(run: PreparedModel, options: PrepareOptions) -> Path:
    """Where the run's measurements are kept: where the user says, or under their digest."""
    if options.profile is not None:
        return Path(options.profile)
    return cache_folder() / f"{identity_of(run).digest}.json"


def find_cost(
    run: PreparedModel, options: PrepareOptions, *, cluster: ClusterSpec, lengths: LengthIndex
) -> DualLayerCost:
    """Costs of the run's model on its ranks; every rank gets the same.

    Raises:
        InputError: the profile's file is something else.
    """
    max_degree = options.max_degree or run.world.size
    degrees = [degree for degree in range(1, max_degree + 1) if run.world.size % degree == 0]
    methods = options.sharing_methods
    effort = ProfilingEffort(memory_bytes=None if options.memory_gib is None else cluster.device.memory_bytes)

    def make() -> LayerTable:
        with progress_bar("measuring two layers", shown=options.verbose and run.world.is_first) as advance:
            return measure(
                run, longest=lengths.max_length, degrees=degrees, methods=methods, effort=effort, on_progress=advance
            )

    path, shown = profile_path(run, options), options.verbose and run.world.is_first
    table, was_kept = find_table(run, path, make, longest=lengths.max_length, degrees=degrees, methods=methods)
    structure = run.wrapped_model.structure
    cost = DualLayerCost(
        table, cluster=cluster, state_on_host=is_on_host(options.offload_state),
        narrow_gradients=options.optimizer_settings.narrow_gradients, unit_params=structure.table().unit_sizes,
    )  # fmt: skip
    if shown:
        origin = "read from" if was_kept else "measured, kept in"
        say(f"{type(run.model).__name__}: {structure.num_layers} layers in {structure.layers_name}")
        ranks = counted(run.world.size, "rank")
        say(f"  {run.num_params:,} parameters in {table.identity.dtype}, {ranks}")
        say(f"  costs {origin} {path}")
        say(f"  curves of two layers of it:\n  {cost.error}")
    if not was_kept and options.check and run.gather is None:
        _check(run, cost, longest=lengths.max_length, shown=shown)
    return cost


def measure_again(run: PreparedModel, cost: DualLayerCost, degree: int) -> DualLayerCost:
    """The cost model with new measurements of one degree; between two steps, on every rank."""
    table = cost.table
    methods = [method for measured, method in cost.fits if measured == degree]
    fresh = measure(run, longest=table.longest, degrees=[degree], methods=methods, update_s=table.update_s)
    other_rows = tuple(row for row in table.rows if row.degree != degree)
    rows = (*other_rows, *fresh.rows)
    for variant in table.variants:
        of_degree = [(degree, method) for method in methods if table.of_degree(degree, method, variant=variant)]
        if variant != AS_PREPARED and of_degree:
            rows += measured_rows(run, table, of_degree, variant)
    return cost.with_table(replace(table, rows=rows))


def measured_rows(
    prepared: PreparedModel,
    table: LayerTable,
    shared: Sequence[tuple[int, Method]],
    variant: LayerVariant,
    effort: ProfilingEffort | None = None,
) -> tuple[LayerRow, ...]:
    """Rows of the same model whose layers compute as ``variant`` says; none if not even the shortest pack that can show
    it fits.
    """
    methods = tuple(dict.fromkeys(method for _, method in shared if method is not Method.DENSE)) or (Method.ULYSSES,)
    try:
        measured = measure(
            prepared,
            longest=table.longest,
            degrees=sorted({degree for degree, _ in shared}),
            methods=methods,
            update_s=table.update_s,
            effort=effort or ProfilingEffort(),
            variant=variant,
        )
    except InputError as error:
        _log.debug("plans have no layers as %s: %s", variant, error)
        return ()
    return measured.rows


def with_rows(
    prepared: PreparedModel, options: PrepareOptions, cost: DualLayerCost, rows: tuple[LayerRow, ...]
) -> DualLayerCost:
    """The costs with more rows, which are saved with the others."""
    table = replace(cost.table, rows=(*cost.table.rows, *rows))
    if rows and options.cost is None and prepared.world.is_first:
        keep_table(table, profile_path(prepared, options))
    return cost.with_table(table)


def _check(run: PreparedModel, cost: DualLayerCost, *, longest: int, shown: bool) -> None:
    """Compute a few micro-batches of the whole model, and say how far off the prediction is."""
    num_layers = cost.table.num_layers
    if shown:
        say("  micro-batches of all its layers:")
    for degree, method in cost.fits:
        predict, slot = partial(cost.predict, method=method), run.collator.slot_tokens
        shorter = [number * slot for number in run.collator.compared_lengths] or [longest >> n for n in range(1, 40)]
        lengths = [longest, *sorted((length for length in shorter if 32 <= length < longest), reverse=True)]
        quick = (length for length in lengths if predict((length,), degree, num_layers)[0] <= CHECKED_S)
        pack = (max(1, next(quick, lengths[-1]) // slot) * slot,)
        for accuracy in check_prediction(
            run, predict, packs=[pack], degrees=[degree], method=method, recomputed=[0, num_layers], repeats=3
        ):
            if shown:
                say(f"  {accuracy}")


def say(words: str) -> None:
    """Print a line on standard error."""
    from rich.console import Console

    Console(stderr=True, highlight=False, markup=False, emoji=False).print(words, soft_wrap=True)


@contextmanager
def progress_bar(words: str, *, shown: bool) -> Iterator[Callable[[float], None]]:
    """A bar on standard error; yields a function that takes the share which is done."""
    if not shown:  # and rich, which is some megabytes, is not loaded
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True, markup=False)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(words, total=1.0)
        yield lambda done: bar.update(task, completed=done)
