"""Issue a rank's remaining collectives with zeros when it cannot go on with a micro-batch, so that no peer hangs.

A rank that ran out of memory, or whose loop left a step by an error or a ``break``, may not just stop: the others of
its group wait for it in the exchanges of attention. Which are left is known (:mod:`.exchange_script`), so it sends
zeros in their place, for what is left of this micro-batch and for all of the next ones. No rank hangs, and all learn at
the update that the step is void.
"""

from collections.abc import Iterable
from itertools import islice, pairwise

import torch

from lengthwise.core.pipeline_config import head_bounds
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


def attention_exchanges(
    call: AttentionExchange | SlotGather, sizes: tuple[int, ...], rank: int
) -> tuple[Exchanged, ...]:
    """Split sizes of an attention's exchanges: of queries, keys and values, then of outputs; swapped in the backward.

    As :func:`~lengthwise.runtime.parallel.head_exchange.ulysses_attention` issues them for slots of ``sizes``.
    """
    if isinstance(call, SlotGather):
        return (gather_sizes(sizes, rank, call.width),)
    bounds = head_bounds(call.num_heads, call.num_kv_heads, degree=len(sizes))
    group_size = call.num_heads // call.num_kv_heads
    queries = [end - start for start, end in pairwise(bounds)]
    keys = [-(-end // group_size) - start // group_size if end > start else 0 for start, end in pairwise(bounds)]
    widths = [(q + 2 * k) * call.head_size for q, k in zip(queries, keys)]
    mine, size = sizes[rank], call.head_size
    to_heads = ([mine * width for width in widths], [size_of_rank * widths[rank] for size_of_rank in sizes])
    to_slots = ([size_of_rank * queries[rank] * size for size_of_rank in sizes], [mine * q * size for q in queries])
    return to_heads, to_slots


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
    for forward in reversed(shard.passes):
        events = list(forward.script.backward(shard.is_recomputed))
        _send(shard, forward.script, events, done)
        done = max(0, done - sum(1 if isinstance(forward.script.calls[call], SlotGather) else 2 for _, call in events))
    shard.is_finished = True


def finish_micro_batch(shard: PackShard, scripts: Iterable[ExchangeScript]) -> None:
    """Send zeros for all that is left of a micro-batch in which models with these scripts are called, in order."""
    if shard.is_finished:
        return
    for forward in shard.passes:
        finish_forward(shard, forward)
    if shard.backward_begun is None:
        for script in islice(scripts, len(shard.passes), None):
            shard.passes.append(ForwardPass(script=script, begun=shard.num_exchanges))
            finish_forward(shard, shard.passes[-1])
    finish_backward(shard)


def _send(shard: PackShard, script: ExchangeScript, events: Iterable[Event], num_done: int) -> None:
    """Send zeros for all exchanges of ``events`` but the first ``num_done``."""
    if shard.group.size == 1:
        return
    number = 0
    for kind, call_number in events:
        for (send, receive), dtype in _sent(shard, script.calls[call_number], kind == "forward"):
            if number >= num_done:
                zeros = torch.zeros(sum(send), dtype=dtype, device=shard.device)
                shard.group.all_to_all(zeros, send, receive)
            number += 1


def _sent(
    shard: PackShard, call: AttentionExchange | SlotGather | Summed, is_forward: bool
) -> Iterable[tuple[Exchanged, torch.dtype]]:
    """The split sizes and dtypes of a call's exchanges, forward or backward."""
    if isinstance(call, Summed):
        return sum_exchanges(call, shard.group.size)
    dtype, forward_sizes = (
        shard.dtype or call.dtype,
        attention_exchanges(call, shard.stage.shards.sizes, shard.group.rank),
    )
    return [
        (sizes, dtype)
        for sizes in (forward_sizes if is_forward else [(back, send) for send, back in reversed(forward_sizes)])
    ]
