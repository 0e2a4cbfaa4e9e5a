"""A check that fails on one rank fails on all of them, with one error that says why and what to do."""

from types import SimpleNamespace

import pytest
import torch

from lengthwise.core.errors import (
    CheckError,
    CommunicationError,
    InfeasibleError,
    InputError,
    LengthwiseError,
    MissingPackage,
)
from lengthwise.runtime.verify.verdict import NotInThisDtype, on_every_rank
from tests.runtime.train.runs import local_world

WHAT = "sequences of 3 and 5 slots in one pack"
ALONE = f"Linear in float32 fails on a sequence alone, called as before it was prepared, in {WHAT}"
PLANNED = f"Linear fails where plans compute it otherwise than its user, in {WHAT}"


def of_loss(error):
    error.add_note("raised by loss= of prepare")
    return error


CASES = [
    (InputError("its own"), False, InputError, "its own"),
    (MissingPackage("peft"), False, InputError, "peft"),
    (InfeasibleError("too long"), True, InfeasibleError, "too long"),
    (CheckError("differs"), False, CheckError, "differs"),
    (LengthwiseError("anything else"), False, CheckError, "anything else"),
    (
        IndexError("index out of range in self"), True, InputError,
        f"Linear looked up a row that one of its tables has not (index out of range in self), in {WHAT} with the corp",
    ),
    (IndexError("Target 7 is out of bounds."), True, InputError, f"Linear fails on a sequence alone, in {WHAT} (Ind"),
    (IndexError("out of range"), True, NotInThisDtype, f"{ALONE} (IndexError: out of range)"),
    (of_loss(KeyError("x")), True, NotInThisDtype, f"{ALONE} (loss= raises KeyError: 'x', in test_verdict.py, line "),
    (IndexError("out of range"), False, NotInThisDtype, f"{PLANNED} (IndexError: out of range)"),
    (
        torch.OutOfMemoryError("CUDA out of memory"), True, InfeasibleError,
        f"Linear ran out of memory when it was compared with the stock model on {WHAT}; lower max_length",
    ),
    (RuntimeError("no kernel\nfor double"), True, NotInThisDtype, f"{ALONE} (RuntimeError: no kernel)"),
    (RuntimeError("no kernel\nfor double"), False, NotInThisDtype, f"{PLANNED} (RuntimeError: no kernel)"),
    (NotImplementedError(), False, NotInThisDtype, f"{PLANNED} (NotImplementedError: no message)"),
]  # fmt: skip


def run_here():
    wrapped_model, collator = SimpleNamespace(make_inputs=None), SimpleNamespace(ignore_index=-100)
    return SimpleNamespace(
        world=local_world(), model=torch.nn.Linear(1, 1), wrapped_model=wrapped_model, collator=collator
    )


def test_an_error_of_one_rank_is_raised_on_all_with_its_class_and_way_out(ranks):
    for raised in ranks(2).run(_refused):
        for (error, is_stock, kind, message), (kind_here, text, reason) in zip(CASES, raised, strict=True):
            assert kind_here == kind.__name__ and text.startswith(message), error
            expected = "FailsAloneError" if is_stock else "NotComputedError"
            assert reason == (expected if kind is NotInThisDtype else "")


def _refused():
    run, raised = run_here(), []
    for error, is_stock, *_ in CASES:

        def compute(error=error):
            if run.world.rank == 1:
                raise error

        with pytest.raises((LengthwiseError, NotInThisDtype)) as refused:
            on_every_rank(run, compute, WHAT, **({"is_stock": True} if is_stock else {}))
        value = refused.value
        raised.append(
            (type(value).__name__, str(value), type(getattr(value, "reason", "")).__name__.replace("str", ""))
        )
    return raised


def test_the_first_rank_that_fails_is_told_and_nothing_where_none_does(ranks):
    assert ranks(3).run(_first) == [(rank, "rank 1 failed") for rank in range(3)]


def _first():
    run = run_here()
    rank = run.world.rank
    result = on_every_rank(run, lambda: rank)

    def compute():
        if rank:
            raise CheckError(f"rank {rank} failed")

    with pytest.raises(CheckError) as refused:
        on_every_rank(run, compute)
    return result, str(refused.value)


def test_where_ranks_are_gone_nothing_is_shared(ranks):
    ranks(1).run(_gone)


def _gone():
    error = CommunicationError("rank 1 is gone")

    def compute():
        raise error

    with pytest.raises(CommunicationError) as raised:
        on_every_rank(run_here(), compute)
    assert raised.value is error
