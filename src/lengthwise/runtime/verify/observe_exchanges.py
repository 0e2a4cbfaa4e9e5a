"""Watch a forward and its backward on one rank, to know which exchanges they issue where ranks share a sequence."""

from lengthwise.core.batch import Pack
from lengthwise.runtime.loop.run import Run
from lengthwise.runtime.wrap.context import PackShard, active
from lengthwise.runtime.wrap.exchange_script import Calls, Event, ExchangeScript
from lengthwise.runtime.wrap.loss_backward import LossTerm, backward


def observe_script(run: Run, num_slots: int) -> ExchangeScript:
    """The script of the run's model, from sequence 0 of ``num_slots`` on this rank alone; leaves no gradient."""
    num_layers = run.wrapped_model.structure.num_layers
    calls, kept = _watched(run, num_slots, ())
    _, recomputed = _watched(run, num_slots, (True,) * num_layers)
    run.discard()
    return ExchangeScript(calls=calls, kept=kept, recomputed=recomputed)


def _watched(run: Run, num_slots: int, recompute: tuple[bool, ...]) -> tuple[Calls, tuple[Event, ...]]:
    """The attention calls of a forward by number, and the events of its backward."""
    pack = Pack(ids=(0,), lengths=(num_slots * run.collator.slot_tokens,))
    events: list[Event] = []
    shard = PackShard(
        step=0, seed=run.seed, ids=pack.ids, cu_seqlens=run.collator.cu_seqlens(pack), group=run.alone,
        device=run.world.device, recompute=recompute, events=events,
    )  # fmt: skip
    with active(shard):
        micro_batch = run.make(shard, pack)
        loss = run.wrapped_model.loss_of(run.model(**micro_batch.inputs), micro_batch)
        calls: Calls = {number: call for (_, number), call in zip(events, shard.attended, strict=True)}
        num_forward = len(events)
        backward([LossTerm(value=loss, weight=0.0)])
    return calls, tuple(events[num_forward:])
