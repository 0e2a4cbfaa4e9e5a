"""What callbacks of transformers' Trainer ask for: all ranks do what a callback of one rank asks for.

Callbacks set flags of ``control`` at any event, and transformers reads them at once: an evaluation that ``on_log`` asks
for begins when it returns. Ranks have to agree first, or one evaluates alone, for ever.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lengthwise.core.errors import InputError
from lengthwise.runtime.loop.call_order import RankOperation, bits_of, float_of, sync_ranks

_ACTS = ("should_log", "should_evaluate", "should_save")
"""In the order in which transformers heeds them; callbacks of each may ask for the next."""
_FLAGS = ("should_training_stop", "should_epoch_stop", *_ACTS)


def act_in_turn(trainer: Any, act: Callable[[], None], *, num_accumulated: int) -> None:
    """Let all ranks log, then evaluate, then save, where a callback of any rank asks for it. Every rank calls this.

    ``act`` does what the flags of ``trainer.control`` say. It is called for one of them at a time.

    Raises:
        InputError: as :func:`agree`, or a callback wants to stop the epoch.
    """

    def agree_in_epoch() -> None:
        agree(trainer, num_accumulated=num_accumulated)
        if trainer.control.should_epoch_stop:
            raise InputError(
                "a callback wants to stop the epoch; every epoch computes every sequence. Stop the training"
            )

    agree_in_epoch()
    for position, flag in enumerate(_ACTS):
        if getattr(trainer.control, flag):
            others = (*_ACTS[:position], *_ACTS[position + 1 :])
            with _held_back(trainer.control, others):
                act()
            agree_in_epoch()


def agree(trainer: Any, *, num_accumulated: int) -> None:
    """Set each flag on all ranks that is set on one. Every rank calls this.

    Raises:
        InputError: a callback has changed what cannot change, or not on every rank.
        CheckError: a rank has left the training, as by an error of a callback.
    """
    control, run = trainer.control, trainer.run
    flags = [int(getattr(control, name)) for name in _FLAGS]
    has_other_batches = trainer.args.gradient_accumulation_steps != num_accumulated
    values = [*flags, int(has_other_batches), bits_of(run.clip_norm)]
    reports = sync_ranks(run.world, RankOperation.CALLBACKS, run.next_step, values=values)
    reports.check_same()
    for number, name in enumerate(_FLAGS):
        setattr(control, name, any(reports.column(number)))
    others, norms = (reports.column(len(_FLAGS) + number) for number in range(2))
    if any(others):
        raise InputError(
            "a callback has set gradient_accumulation_steps, and the sequences of each step are chosen before "
            f"training; leave it at {num_accumulated}"
        )
    if len(set(norms)) > 1:
        words = ", ".join(f"{float_of(norm):g}" for norm in norms)
        raise InputError(f"max_grad_norm is {words} on the ranks; a callback has to set the same on every rank")


@contextmanager
def _held_back(control: Any, names: tuple[str, ...]) -> Iterator[None]:
    """Flags that read as false meanwhile, whatever callbacks set them to, and keep what they are set to."""
    kind = type(control)
    control.__class__ = type(kind.__name__, (kind,), {name: _reads_as_false(name) for name in names})
    try:
        yield
    finally:
        control.__class__ = kind


def _reads_as_false(name: str) -> property:
    def keep(control: Any, value: bool) -> None:
        vars(control)[name] = value

    return property(lambda control: False, keep)
