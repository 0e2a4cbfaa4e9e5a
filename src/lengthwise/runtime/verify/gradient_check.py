"""Check before training that packs, shards and recompute give the loss and gradients of the stock model.

The model is called as its user calls it, with one sequence at a time and without positions, in training mode with noise
switched off, and compared with what training will compute: packs of several sequences, shared by the real ranks in
groups of every degree, with layers that recompute. Losses and the gradient of every parameter are compared, in float64
where memory allows. What differs is refused with the layer and the operation where the difference begins.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from lengthwise.core.errors import CheckError, InfeasibleError, InputError, LengthwiseError, Setting
from lengthwise.core.pipeline_config import Method
from lengthwise.runtime.comm.collectives import gather_rows
from lengthwise.runtime.comm.objects import broadcast_json
from lengthwise.runtime.loop.prepared_model import PreparedModel
from lengthwise.runtime.loop.synthetic_batches import synthetic_borders, synthetic_of_all_kinds, varied
from lengthwise.runtime.profile.probes import LoopbackGroup
from lengthwise.runtime.profile.trial import group_of_degree
from lengthwise.runtime.verify.batch_losses import check_loss_of_sequences
from lengthwise.runtime.verify.closed_gates import ClosedGates
from lengthwise.runtime.verify.compute_settings import RECOMPUTE, ComputeSetting, Slots, settings_of, within
from lengthwise.runtime.verify.first_difference import locate_difference
from lengthwise.runtime.verify.precision import Tolerance, compare_precisely
from lengthwise.runtime.verify.scratch_copy import check_buffers, saved_buffers
from lengthwise.runtime.verify.sequence_order import StateWatch
from lengthwise.runtime.verify.stock_call import (
    GradientResult,
    gradients_alone,
    gradients_in_pack,
)
from lengthwise.runtime.verify.summed_losses import check_loss_is_no_sum
from lengthwise.runtime.verify.verdict import FailsAloneError, NotComputedError, NotInThisDtype, on_every_rank
from lengthwise.runtime.verify.worst_difference import WorstDifference, worst_difference
from lengthwise.runtime.verify.zero_weights import Fill, of_stock, warn_of_zeros
from lengthwise.runtime.wrap.context import ALMOST_ONE, ALMOST_ZERO
from lengthwise.runtime.wrap.refused_draws import random_states
from lengthwise.runtime.wrap.state_between_calls import StateBetweenCalls, StateError
from lengthwise.runtime.wrap.tiled_modules import short_tiles

_log = logging.getLogger("lengthwise")
MADE_UP = {Slots.FEW: varied, Slots.ALL_KINDS: synthetic_of_all_kinds, Slots.ENDS: synthetic_borders}
"""Which sequences are made of some slots of the corpus."""


def check_exact(
    run: PreparedModel,
    *,
    degrees: Sequence[int] | None = None,
    methods: Sequence[Method] = (Method.ULYSSES,),
    recompute: Sequence[str] = RECOMPUTE,
    longest: int | None = None,
    head_groups: int = 1,
    on_progress: Callable[[float], None] = lambda share: None,
) -> None:
    """Compare loss and gradients of packs with those of the stock model, called on each sequence alone.

    Every rank calls this and gets the same verdict.

    Args:
        run: whose model has been learned.
        degrees: that plans may use; None: the divisors of the world's size, and all numbers up to 4.
        methods: by which plans may share sequences.
        recompute: which of ``none``, ``all`` and ``alternate`` layers plans may recompute; ``selective``: all, but for
            what attention gave.
        longest: slots of the longest sequence of the corpus; None: only short ones are compared.
        head_groups: groups of heads that attention computes one after the other.
        on_progress: hears of the share of the comparisons that is done.

    Raises:
        CheckError: they differ by more than rounding, or the forward changes the model's buffers.
        InputError: the model cannot be computed in packs at all.
    """
    size = run.world.size
    if run.wrapped_model.by_sequence is not None:
        degrees = [1]
    if degrees is None:
        degrees = [degree for degree in range(1, size + 1) if degree <= 4 or size % degree == 0]
    settings = settings_of(run, degrees=degrees, methods=methods, recompute=recompute, longest=longest)
    most_slots = run.wrapped_model.most_slots
    settings = [replace(s, head_groups=head_groups, lengths=within(most_slots, s.lengths)) for s in settings]

    gates = ClosedGates(run)

    def compare(tolerance: Tolerance, fill: Fill) -> None:
        state = StateBetweenCalls(run.model, saved_buffers=False)
        try:
            with short_tiles(run.wrapped_model.tiles):
                compare_settings(run, settings, tolerance, fill, on_progress, gates)
        except StateError as error:
            raise error if error.is_named else state.error() from None
        finally:
            watch.note(state)

    watch = StateWatch()
    check_loss_is_no_sum(run)
    slots = [length for setting in settings if setting.gradients for length in setting.lengths]
    check_order = partial(watch.check, run, (min(slots), max(slots), longest or max(slots)))
    unfilled = _compare_and_order(run, compare, check_order)
    _compare_with_gates_open(run, settings, gates.names)
    check_loss_of_sequences(run, Fill.NOTHING if unfilled else Fill.SIGNED)
    warn_of_zeros(run, unfilled)


def _compare_and_order(
    run: PreparedModel, compare: Callable[[Tolerance, Fill], None], check_order: Callable[[], None]
) -> str:
    """Compare packs, and then check that the order of calls matters to nothing; says why zeros stayed, if they did."""
    try:
        unfilled = compare_precisely(run, compare)
    except CheckError as error:
        if not isinstance(error, StateError):
            check_order()  # which is the reason then
        raise
    check_order()
    return unfilled


def _compare_with_gates_open(run: PreparedModel, settings: list[ComputeSetting], names: frozenset[str]) -> None:
    """Compare packs again with other values of the parameters whose gradients are too small to be compared.

    A model that cannot be computed with them keeps those that it has.

    Raises:
        CheckError: packs differ then.
    """
    if not names:
        return
    first, before = settings[0], run.hidden_weights
    of_first = [s for s in settings if (s.lengths, s.slots, s.recompute) == (first.lengths, first.slots, "none")]
    run.hidden_weights |= names
    try:
        with short_tiles(run.wrapped_model.tiles):
            is_computed = not compare_precisely(run, partial(compare_settings, run, of_first))
    except (InputError, InfeasibleError, FailsAloneError, NotComputedError):
        is_computed = False
    if not is_computed:
        run.hidden_weights = before


def compare_settings(
    run: PreparedModel,
    settings: list[ComputeSetting],
    tolerance: Tolerance,
    fill: Fill,
    on_progress: Callable[[float], None] = lambda share: None,
    gates: ClosedGates | None = None,
) -> None:
    """Compare packs computed in each of the settings with the stock model; every rank calls this.

    Raises:
        CheckError: they differ by more than rounding, or the forward changes the model's buffers.
        NotInThisDtype: the model cannot be computed so.
        NotWithTheseWeights: the stock model has no finite numbers where weights were filled.
    """
    before, alone, alone_of = saved_buffers(run.model), GradientResult(loss=0.0, gradients=[]), None
    dry = set[tuple[tuple[int, ...], int, Method, Slots]]()
    for number, setting in enumerate(settings):
        on_progress(number / len(settings))
        key, what = (setting.lengths, setting.gradients, setting.slots), str(setting)
        group = group_of_degree(run.world, setting.degree)
        with MADE_UP[setting.slots](run, setting.lengths), torch.set_grad_enabled(setting.gradients):
            if key != alone_of:  # settings of one key follow one another
                stock = partial(gradients_alone, run, setting.lengths, gradients=setting.gradients)
                stock = partial(of_stock, run, stock, fill)
                alone, alone_of = on_every_rank(run, stock, what, is_stock=True), key
                on_every_rank(run, partial(check_buffers, run.model, before))
                if gates is not None:
                    gates.note(alone, tolerance)
            shape = (setting.lengths, setting.degree, setting.method, setting.slots)
            if setting.degree > 1 and shape not in dry:
                dry.add(shape)
                _check_same_exchanges(run, setting, group)
            packed = _packed_or_refused(run, setting, group, alone, tolerance)
            _verdict(run, setting, packed, alone, tolerance)
            on_every_rank(run, partial(check_buffers, run.model, before))


def _packed_or_refused(
    run: PreparedModel, setting: ComputeSetting, group: Any, alone: GradientResult, tolerance: Tolerance
) -> GradientResult | None:
    """Gradients of a pack; if the model fails, and would not without recompute, the error says so."""
    try:
        return on_every_rank(run, partial(_packed_undrawn, run, setting, group), str(setting))
    except NotInThisDtype as error:
        if not _is_exact_without_recompute(run, setting, group, alone, tolerance):
            raise
        raise NotInThisDtype(
            error.reason.with_message(
                f"{error.reason.marked}; layers that change what they are given, or share state beside it, cannot be "
                f"recomputed; set {Setting.RECOMPUTE}=none for them"
            )
        ) from None


def _packed_undrawn(run: PreparedModel, setting: ComputeSetting, group: Any) -> GradientResult | None:
    """Gradients of a pack, after a check that the forward draws no random numbers outside of our control.

    Raises:
        InputError: it draws some.
    """
    before = random_states(run.world.device)
    packed, _ = _packed(run, setting, group)
    drawn = [name for name, state in random_states(run.world.device).items() if state != before[name]]
    if not drawn or run.wrapped_model.by_sequence is not None:
        return packed
    raise InputError(
        f"the forward of {type(run.model).__name__} draws random numbers from {' and '.join(drawn)} in a way that "
        "cannot be the same on all ranks; draw with dropout, torch.randn_like or torch.rand_like"
    )


def _packed(run: PreparedModel, setting: ComputeSetting, group: Any) -> tuple[GradientResult | None, int]:
    try:
        return gradients_in_pack(
            run, setting.lengths, group, recompute=_flags(run, setting.recompute), method=setting.method,
            keep_attention=setting.recompute == "selective", offload=setting.offload, 
            scalar=setting.scalar or ALMOST_ZERO, head_groups=setting.head_groups, gradients=setting.gradients,
        )  # fmt: skip
    except CheckError:
        if setting.scalar == ALMOST_ONE:
            raise
        raise _decided_at_random(run) from None  # other calls were made, which is a difference as well


def _decided_at_random(run: PreparedModel) -> CheckError:
    drawn_in = run.wrapped_model.rules.drawn_in
    names = {id(module): name for name, module in run.model.named_modules()}
    where = next((f", in {names[id(x)]} ({type(x).__name__})," for x in drawn_in if names.get(id(x))), "")
    return CheckError(
        f"{type(run.model).__name__} draws a random number in its forward{where} that decides what is computed, such "
        "as which layers are left out, and ranks that share a sequence would decide differently; set layerdrop "
        "(encoder_layerdrop, decoder_layerdrop), or module_dropout of adapters, to 0 in its config"
    )


def _flags(run: PreparedModel, recompute: str) -> tuple[bool, ...]:
    """One flag per layer for a recompute setting: whether the layer is recomputed."""
    num_layers = run.wrapped_model.structure.num_layers
    return {
        "none": (),
        "all": (True,) * num_layers,
        "selective": (True,) * num_layers,
        "alternate": tuple(layer % 2 == 0 for layer in range(num_layers)),
    }[recompute]


def _check_same_exchanges(run: PreparedModel, setting: ComputeSetting, group: Any) -> None:
    """Compute a setting on a loopback group first, so that an error on one rank leaves no other rank waiting.

    Raises:
        CheckError: ranks would exchange different numbers of messages, and wait for each other for ever.
    """
    silent = None if group is None else LoopbackGroup(rank=group.rank, ranks=group.ranks, handle=group.handle)
    _, num_made = on_every_rank(run, partial(_packed, run, setting, silent), str(setting))
    counts = gather_rows(torch.tensor([num_made, group is not None], device=run.world.device)).tolist()
    made = {count for count, is_in_group in counts if is_in_group}
    if len(made) > 1:
        raise CheckError(
            f"{type(run.model).__name__} makes {min(made)} exchanges between ranks on one rank and {max(made)} on "
            f"another, for {setting}: what its forward computes depends on its share of the tokens, and ranks "
            "would wait for each other for ever"
        )


def _verdict(
    run: PreparedModel,
    setting: ComputeSetting,
    packed: GradientResult | None,
    alone: GradientResult,
    tolerance: Tolerance,
) -> None:
    """Raise the same ``CheckError`` on every rank if loss or gradients of the pack differ on any of them."""
    worst = (
        WorstDifference(ratio=0.0, relative=0.0, name="")
        if packed is None
        else worst_difference(run, packed, alone, tolerance)
    )
    ratios = gather_rows(torch.tensor([worst.ratio], dtype=torch.float64, device=run.world.device)).flatten()
    if bool((ratios <= 1.0).all()):
        return
    if setting.scalar != ALMOST_ONE:
        raise _decided_at_random(run)
    _check_called_again(run, setting, alone, tolerance)
    methods = (setting.method,) * run.wrapped_model.structure.num_layers
    group = group_of_degree(run.world, setting.degree)
    where = locate_difference(
        run, setting.lengths, group, _flags(run, setting.recompute), methods,
        is_of_recompute=_is_exact_without_recompute(run, setting, group, alone, tolerance),
    )  # fmt: skip
    source = int(ratios.nan_to_num(torch.inf).argmax())
    name, relative = broadcast_json(run.world, [worst.name, float(worst.relative)], source=source)
    together = "packs" if run.wrapped_model.by_sequence is None else "micro-batches of several sequences"
    raise CheckError(
        f"{type(run.model).__name__} learns something else from {together} than from its sequences one by one, called "
        f"as its user calls it ({setting}): {name} differs by {relative:.1e} (limit {tolerance.relative:.0e}). {where}"
    )


def _is_exact_without_recompute(
    run: PreparedModel, setting: ComputeSetting, group: Any, alone: GradientResult, tolerance: Tolerance
) -> bool:
    """Whether nothing differs where no layer is recomputed; every rank calls this."""
    if setting.recompute == "none":
        return False
    plain = replace(setting, recompute="none")
    try:
        packed, _ = on_every_rank(run, partial(_packed, run, plain, group), str(plain))
    except (LengthwiseError, NotInThisDtype):
        return False
    ratio = 0.0 if packed is None else worst_difference(run, packed, alone, tolerance).ratio
    return _is_within(run, ratio)


def _is_within(run: PreparedModel, ratio: float) -> bool:
    """Whether no rank has a difference beyond its limit; every rank calls this."""
    return bool((gather_rows(torch.tensor([ratio], dtype=torch.float64, device=run.world.device)) <= 1.0).all())


def _check_called_again(
    run: PreparedModel, setting: ComputeSetting, alone: GradientResult, tolerance: Tolerance
) -> None:
    """Raise ``CheckError`` if the stock model, called on the same sequences again, does not give the same."""
    state = StateBetweenCalls(run.model)
    again = on_every_rank(
        run, partial(gradients_alone, run, setting.lengths, gradients=setting.gradients), str(setting), is_stock=True
    )
    if not _is_within(run, worst_difference(run, again, alone, tolerance).ratio):
        raise state.error()
