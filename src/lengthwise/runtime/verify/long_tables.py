"""Let a model make its tables of positions as long as comparisons need them.

Where it made them in a comparison in float64, rows would be of other precisions than those that it keeps.
"""

from lengthwise.runtime.loop.prepared_model import PreparedModel
from lengthwise.runtime.loop.synthetic_batches import LENGTHS, synthetic
from lengthwise.runtime.verify.compute_settings import SEEN_FORWARD
from lengthwise.runtime.verify.stock_call import pack_of, shard_for
from lengthwise.runtime.wrap.completed_calls import CompletedCall
from lengthwise.runtime.wrap.context import active


def make_long_tables(run: PreparedModel, *, num_slots: int, longest: int) -> None:
    """Let the model make its tables for packs of ``num_slots`` slots, and for the longest sequence that is compared."""
    longest = min(longest, SEEN_FORWARD)
    num_slots = max(num_slots, longest)
    if not run.wrapped_model.tables.may_grow(num_slots):
        return
    lengths = longest, *[min(LENGTHS)] * -(-(num_slots - longest) // min(LENGTHS))
    with synthetic(run, lengths):
        pack = pack_of(run, lengths)
        micro_batch = run.make(shard_for(run, pack, run.alone), pack)
        with active(micro_batch.shard):
            call = CompletedCall(args=(), kwargs=run.wrapped_model.inputs_of(micro_batch))
            run.wrapped_model.grow_tables(micro_batch.shard, call)
