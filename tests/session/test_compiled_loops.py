"""What a loop compiles around a prepared model, or of it, learns what the model learns alone, or is refused."""

from functools import partial

import numpy as np
import pytest
import torch

import lengthwise as lw
from lengthwise.core.errors import InputError
from lengthwise.core.step_plan import StepPlan
from tests.session import models
from tests.session.structure_runs import OPTIONS, pipeline_of

pytestmark = pytest.mark.usefixtures("unchecked")

LENGTHS = (7, 9, 9, 7, 12, 4)
"""Two in each pack: of one total, with other cuts."""
REFUSED = r"was compiled after prepare, and compiled code .* leave torch\.compile out, .*compile=True"


def pairs(num_layers, batch):
    lengths, ids = dict(zip(batch.ids, batch.lengths)), sorted(batch.ids)
    pipeline = pipeline_of(lengths, (0,), [ids[:2], ids[2:4], ids[4:]], num_layers, False)
    return StepPlan(
        step=batch.step, policy="by hand", pipelines=(pipeline,), loss_normaliser=batch.num_targets, update_s=0.0,
        time_s=1.0, lower_bound_s=1.0,
    )  # fmt: skip


def learned(make_loss, num_steps=2):
    """The weights after some steps of a loop whose loss ``make_loss`` makes of the prepared model."""
    model = models.gpt()
    rows = [np.random.default_rng(number).integers(0, models.VOCAB, length) for number, length in enumerate(LENGTHS)]
    run = lw.prepare(model, rows, steps=num_steps, **OPTIONS | {"sequences_per_step": len(LENGTHS)})
    run.planner = partial(pairs, len(model.blocks))
    loss_of = make_loss(model)
    with run:
        for step in run.steps():
            for micro_batch in step:
                step.backward(loss_of(micro_batch))
            step.update()
    return {name: value.detach() for name, value in model.named_parameters()}


def plain(model):
    return lambda micro_batch: model(**micro_batch.inputs)[1]


def compiled_step(model, backend):
    @torch.compile(backend=backend)
    def call(**inputs):
        return model(**inputs)

    return lambda micro_batch: call(**micro_batch.inputs)[1]


@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.deep)])
def test_compiled_code_around_a_prepared_model_learns_what_the_model_learns(backend):
    torch.compiler.reset()
    expected, found = learned(plain), learned(partial(compiled_step, backend=backend))
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-12)


def test_compiled_code_that_may_have_no_break_is_refused_with_the_way_out():
    def whole(model):
        call = torch.compile(lambda **inputs: model(**inputs)[1], backend="eager", fullgraph=True)
        return lambda micro_batch: call(**micro_batch.inputs)

    with pytest.raises(Exception, match=r"a prepared model is not traced: leave torch\.compile out .*compile=True"):
        learned(whole)


def compile_layer(model):
    model.blocks[0].compile(backend="eager")


def compile_model(model):
    model.compile(backend="eager")


def compile_method(model):
    model.blocks[1].mlp.forward = torch.compile(model.blocks[1].mlp.forward, backend="eager")


@pytest.mark.parametrize("change", [compile_layer, compile_model, compile_method])
def test_what_a_loop_compiles_of_a_prepared_model_is_refused_with_the_way_out(change):
    def changed(model):
        change(model)
        return plain(model)

    with pytest.raises(InputError, match=REFUSED):
        learned(changed)
