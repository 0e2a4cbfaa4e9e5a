"""How many pipeline stages the plans of a prepared model may have."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from lengthwise.config.prepare_options import PrepareOptions
from lengthwise.core.cost import CostModel
from lengthwise.core.errors import InfeasibleError, LengthwiseError
from lengthwise.cost.profiled.dual_layer import DualLayerCost
from lengthwise.runtime.loop.prepared_model import PreparedModel
from lengthwise.runtime.verify.stage_check import check_stages

_log = logging.getLogger("lengthwise")


def most_stages(prepared: PreparedModel, options: PrepareOptions) -> int | None:
    """The most stages of a plan: as many as are asked for, or 1, with the reason logged, if there can be none.

    Stages of one layer each are compared with the whole model, which says the same of all others. Every rank calls
    this. None: as many as the cluster has room for.
    """
    num_layers, asked = prepared.wrapped_model.structure.num_layers, options.max_stages
    trivial = {
        "max_stages=1": asked == 1,
        "there is one rank": prepared.world.size == 1,
        "it has one layer": num_layers == 1,
    }
    problems = {
        prepared.stage_problem: bool(prepared.stage_problem),
        "frozen models compute beside it": bool(options.frozen),
        "coupled_loss= couples its micro-batches": options.coupled_loss is not None,
        "stages were not compared with the whole model (check=False)": asked is None and not options.check,
    }
    problem = _first_of(trivial) or _first_of(problems)
    if not problem:
        try:
            check_stages(prepared, (1,) * num_layers)
            prepared.is_cuttable = True
        except LengthwiseError as error:
            problem = str(error).partition("; plan with")[0]
    prepared.one_stage_because = "" if any(trivial.values()) else problem
    if problem and prepared.world.is_first:
        is_asked = options.zero_bubble == "all" or (asked is not None and not any(trivial.values()))
        unsplit = ", so zero_bubble='all' splits no backward" if options.zero_bubble == "all" else ""
        name, level = type(prepared.model).__name__, logging.WARNING if is_asked else logging.DEBUG
        _log.log(level, "%s is computed in one pipeline stage%s: %s", name, unsplit, problem)
    return 1 if problem else asked


def _first_of(applies: dict[str, bool]) -> str:
    return next((words for words, is_so in applies.items() if is_so), "")


@contextmanager
def telling_why_one_stage(prepared: PreparedModel) -> Iterator[None]:
    """Within, an error that no scheme fits says why there are none of several stages, if that was looked at.

    Raises:
        InfeasibleError: what is raised within, with the reason.
    """
    try:
        yield
    except InfeasibleError as error:
        reason = prepared.stage_problem or prepared.one_stage_because
        if not reason or prepared.world.size == 1:
            raise
        raise error.with_message(f"{error.marked} Plans have one pipeline stage alone: {reason}.") from None


def head_layers(cost: CostModel) -> float:
    """Layers that cost as much as the head and the loss, where that was measured."""
    return cost.head_layers if isinstance(cost, DualLayerCost) else 0.0
