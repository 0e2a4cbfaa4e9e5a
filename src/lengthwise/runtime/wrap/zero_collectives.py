"""Issue a rank's remaining collectives with zeros when it cannot go on with a micro-batch, so that no peer hangs.

A rank that ran out of memory, or whose loop left a step by an error or a ``break``, may not just stop: the others of
its group wait for it in the exchanges of attention. Which are left is known (:mod:`.exchange_script`), so it sends
zeros in their place, for what is left of this micro-batch and for all of the next ones. No rank hangs, and all learn at
the update that the step is void.
"""

from collections.abc import Iterable
from itertools import islice

import torch

from lengthwise.runtime.comm.exchange import Exchange
from lengthwise.runtime.wrap.context import ForwardPass, PackShard
from lengthwise.runtime.wrap.exchange_script import AttentionExchange, Event, ExchangeScript, SlotGather, Summed

Exchanged = tuple[list[int], list[int]]
"""Split sizes of an all-to-all: numbers sent to each rank, and received from each."""


def gather_sizes(sizes: tuple[int, ...], rank: int, width: int) -> Exchanged:
    """Split sizes of a gather of ``width`` numbers of every slot by all ranks; swapped in the backward."""
    return [sizes[rank] * width] * len(sizes), [size * width for size in sizes]


SAID = 8
"""Integers that a rank says of its sums by sequence: 1 if it has some, their dtype, and their shape."""


def sum_exchanges(call: Summed, size: int) -> list[tuple[Exchanged, torch.dtype]]:
    """Split sizes and dtypes of a sum over ``size`` ranks: of the shapes, then of the sums if others wait for them."""
    numbers = [(SAID, torch.int64), (call.count, call.dtype)]
    return [(([number] * size, [number] * size), dtype) for number, dtype in numbers if number]


def exchanges_of(shard: PackShard, call: AttentionExchange | SlotGather | Summed, is_forward: bool) -> list[Exchange]:
    """The exchanges of a call's forward or backward, in order, under the method of its layer."""
    group = shard.group
    if isinstance(call, Summed):
        of_sums = sum_exchanges(call, group.size)
        return [
            Exchange(group=group, send=send, receive=receive, dtype=dtype)
            for (send, receive), dtype in (of_sums if is_forward else of_sums[1:])
        ]
    if isinstance(call, SlotGather):
        send, receive = gather_sizes(shard.stage.shards.sizes, group.rank, call.width)
        gather = Exchange(group=group, send=send, receive=receive, dtype=call.dtype)
        return [gather if is_forward else gather.reversed]
    dtype = shard.dtype or call.dtype
    grouped = shard.in_head_groups(num_heads=call.num_heads, num_kv_heads=call.num_kv_heads, layer=call.layer)
    if grouped is not None:
        return grouped.exchanges(call.head_size, dtype, backward=not is_forward)
    sharing = shard.sharing(num_heads=call.num_heads, num_kv_heads=call.num_kv_heads, layer=call.layer)
    return sharing.exchanges(call.num_heads, call.num_kv_heads, call.head_size, dtype, backward=not is_forward)


def finish_forward(shard: PackShard, forward: ForwardPass) -> None:
    """Send zeros for the exchanges of a forward that this rank did not come to."""
    if forward.ended is None:
        _send(shard, forward.script, forward.script.forward(), shard.num_exchanges - forward.begun)
        forward.ended = shard.num_exchanges


def finish_backward(shard: PackShard) -> None:
    """Send zeros for the backward exchanges of all forwards of a micro-batch, the last one first."""
    if shard.backward_begun is None:
        shard.backward_begun = shard.num_exchanges
    done = shard.num_exchanges - shard.backward_begun
    for forward in reversed(shard.passes if shard.group.size > 1 else []):
        script = forward.backward_script or forward.script
        events = list(script.backward(shard.is_recomputed))
        _send(shard, script, events, done)
        num_issued = sum(len(exchanges_of(shard, script.calls[call], kind == "forward")) for kind, call in events)
        done = max(0, done - num_issued)
    shard.is_finished = True


def finish_forwards(shard: PackShard, scripts: Iterable[ExchangeScript]) -> None:
    """Send zeros for what is left of the forwards of a micro-batch in which models with these scripts are called."""
    for forward in shard.passes:
        finish_forward(shard, forward)
    if shard.backward_begun is None:
        for script in islice(scripts, len(shard.passes), None):
            shard.passes.append(ForwardPass(script=script, begun=shard.num_exchanges))
            finish_forward(shard, shard.passes[-1])


def finish_micro_batch(shard: PackShard, scripts: Iterable[ExchangeScript]) -> None:
    """Send zeros for all that is left of a micro-batch in which models with these scripts are called, in order."""
    if not shard.is_finished:
        finish_forwards(shard, scripts)
        finish_backward(shard)


def _send(shard: PackShard, script: ExchangeScript, events: Iterable[Event], num_done: int) -> None:
    """Send zeros for all exchanges of ``events`` but the first ``num_done``."""
    if shard.group.size == 1:
        return
    exchanges = (
        exchange for kind, number in events for exchange in exchanges_of(shard, script.calls[number], kind == "forward")
    )
    for exchange in islice(exchanges, num_done, None):
        exchange.issue(shard.device)
