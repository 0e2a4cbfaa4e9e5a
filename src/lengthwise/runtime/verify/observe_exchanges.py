"""Observe a forward and backward on one rank to learn which exchanges they issue where ranks share a sequence."""

from lengthwise.core.batch import Pack
from lengthwise.runtime.loop.prepared_model import PreparedModel
from lengthwise.runtime.wrap.context import PackShard, active
from lengthwise.runtime.wrap.exchange_script import Calls, Event, ExchangeScript
from lengthwise.runtime.wrap.loss_backward import LossTerm, backward
from lengthwise.runtime.wrap.parameter_use import ParameterUse


def observe_script(run: PreparedModel, num_slots: int) -> ExchangeScript:
    """Record the exchange script of the run's model on a sequence of ``num_slots``, by this rank alone.

    On the way it is noted which parameters each position of the forward uses.
    """
    wrapped_model, structure = run.wrapped_model, run.wrapped_model.structure
    use = ParameterUse(structure, wrapped_model.layers)
    num_layers = structure.num_layers
    with use:
        calls, without_recompute = _watched(run, num_slots, ())
    wrapped_model.used_units = use.by_position(wrapped_model.deferred_parameters)
    if run.gather is not None:
        run.gather.use(wrapped_model.used_units)
    _, with_recompute = _watched(run, num_slots, (True,) * num_layers)
    run.discard()
    return ExchangeScript(calls=calls, without_recompute=without_recompute, with_recompute=with_recompute)


def _watched(run: PreparedModel, num_slots: int, recompute: tuple[bool, ...]) -> tuple[Calls, tuple[Event, ...]]:
    """Return the attention calls of a forward by number, and the events of its backward."""
    pack = Pack(ids=(0,), lengths=(num_slots * run.collator.slot_tokens,))
    events: list[Event] = []
    shard = PackShard(
        step=0, seed=run.seed, ids=pack.ids, cu_seqlens=run.collator.cu_seqlens(pack), group=run.alone,
        device=run.world.device, recompute=recompute, events=events,
    )  # fmt: skip
    with run.gathered(), active(shard):
        micro_batch = run.make(shard, pack)
        loss = run.wrapped_model.loss_of(run.model(**micro_batch.inputs), micro_batch)
        calls: Calls = {number: call for (_, number), call in zip(events, shard.attended, strict=True)}
        num_forward = len(events)
        run.begin_backward()
        backward([LossTerm(value=loss, weight=0.0)])
    return calls, tuple(events[num_forward:])
