"""The user's loop: what it may forget is told, and what it may not know of is set right."""

import gc
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from lengthwise.config.optimizer_settings import OptimizerSettings
from lengthwise.core.batch import NEXT_TOKEN
from lengthwise.core.errors import CheckError, InputError, LengthwiseError
from lengthwise.runtime.comm.world import start_world
from lengthwise.runtime.loop.loop_ledger import MOST_WITHOUT_LOSS
from lengthwise.runtime.wrap.collator import PackCollator
from lengthwise.runtime.wrap.wrapped_model import WrappedModel
from tests.runtime.loop.memory_runs import LENGTHS, VOCABULARY, Model, Source, Stream, plan_on, run_of
from tests.runtime.wrap.test_position_ids import built

IGNORED = -100
IN_BFLOAT16 = 2e-2
"""Numbers have eight bits, and products of a pack are summed in another order."""


def make_run(*, degree=1, labels=None, clip_norm=0.0, num_steps=1):
    world = start_world("cpu")
    torch.manual_seed(0)
    return run_of(
        WrappedModel(Model().double()), world, stream=Stream(), planner=plan_on(world.size, degree, 0),
        collator=PackCollator(source=Source(), objective=NEXT_TOKEN, labels=labels),
        optimizer=OptimizerSettings(name="sgd", momentum=0.0, weight_decay=0.0), lr=lambda step: 1.0,
        clip_norm=clip_norm, num_steps=num_steps,
    )  # fmt: skip


def compute(run, step):
    for micro_batch in step:
        step.backward(run.model(**micro_batch.inputs)[1])


def labels_of(sequence):
    """Of the first two sequences a few tokens have a loss, of the third none, of the fourth all."""
    tokens = Source().tokens(sequence).astype(np.int64)
    kept = {0: (np.arange(len(tokens)) % 7 == 3), 1: np.arange(len(tokens)) == 4, 2: np.zeros(len(tokens), bool)}
    return np.where(kept.get(sequence, np.ones(len(tokens), bool)), tokens, IGNORED)


def by_hand(labels):
    """Loss and weights after one step of plain gradient descent on all sequences, each alone."""
    torch.manual_seed(0)
    model = Model().double()
    total, count = torch.zeros((), dtype=torch.float64), 0
    for sequence in range(len(LENGTHS)):
        tokens = torch.from_numpy(Source().tokens(sequence))[None]
        targets = torch.from_numpy(labels(sequence).astype(np.int64))[1:]
        logits = model(tokens, tokens)[0][0, :-1]
        total = total + F.cross_entropy(logits, targets, reduction="sum", ignore_index=IGNORED)
        count += int((targets != IGNORED).sum())
    (total / count).backward()
    return float(total.detach()) / count, [p.detach() - p.grad for p in model.parameters()]


@pytest.mark.parametrize(
    ("num_ranks", "degree"),
    [(3, 3), *(pytest.param(*sizes, marks=pytest.mark.deep) for sizes in ((4, 2), (1, 1), (2, 2)))],
)
def test_labels_that_leave_out_tokens_weigh_as_one_device_weighs_them(ranks, num_ranks, degree):
    expected_loss, expected = by_hand(labels_of)
    for loss, weights in ranks(num_ranks).run(train_with_labels, degree):
        assert loss == pytest.approx(expected_loss, abs=1e-12)
        for mine, theirs in zip(weights, expected):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-11)


def train_with_labels(degree):
    run = make_run(degree=degree, labels=labels_of)
    for step in run.steps():
        compute(run, step)
        result = step.update()
    run.close()
    return result.loss, [parameter.detach().clone() for parameter in run.model.parameters()]


def test_steps_in_which_nothing_has_a_loss_are_skipped_until_there_are_many_in_a_row(ranks):
    ranks(2).run(check_no_loss)


def check_no_loss():
    run = make_run(labels=lambda sequence: np.full(LENGTHS[sequence], IGNORED), num_steps=MOST_WITHOUT_LOSS)
    for step in run.steps():
        compute(run, step)
        if step.number < MOST_WITHOUT_LOSS - 1:
            assert step.update().is_skipped
            continue
        with pytest.raises(LengthwiseError, match=r"step 9: no token .* has a loss.* raise sequences_per_step"):
            step.update()
        break
    run.close()


def test_what_a_loop_forgets_is_told(ranks):
    ranks(1).run(check_forgotten)


def check_forgotten():
    run = make_run(num_steps=3)
    steps = run.steps()
    step = next(steps)
    with pytest.raises(CheckError, match="step 0: update after 0 of 3 micro-batches"):
        step.update()
    with pytest.raises(CheckError, match="backward without a micro-batch"):
        step.backward(torch.zeros(()))
    micro_batches = iter(step)
    micro_batch = next(micro_batches)
    run.model(**micro_batch.inputs)
    with pytest.raises(CheckError, match=r"micro-batch 0 of pipeline 0 got no step.backward\(loss\)"):
        next(micro_batches)
    with pytest.raises(CheckError, match="iterated before"):
        next(iter(step))
    again = next(steps)
    assert (again.number, again.attempt) == (0, 1), "what was left in its midst comes again"
    compute(run, again)
    with pytest.raises(CheckError, match=r"step 0 got no step.update\(\)"):
        next(steps)
    run.close()

    run = make_run()
    step = next(run.steps())
    with pytest.raises(CheckError, match=r"gradient of tokens.weight was taken away, by optimizer.zero_grad\(\)"):
        for micro_batch in step:
            loss = run.model(**micro_batch.inputs)[1]
            run.model.zero_grad()  # which is nothing before the first backward
            step.backward(loss)
    assert step._position == 1
    run.close()


def test_what_the_last_layer_returns_is_gone_after_its_micro_batch(ranks):
    ranks(1).run(check_outputs_are_gone)


def check_outputs_are_gone():
    run, outputs = make_run(), []
    run.model.layers[-1].register_forward_hook(lambda layer, args, output: outputs.append(weakref.ref(output)))
    for step in run.steps():
        for micro_batch in step:
            step.backward(run.model(**micro_batch.inputs)[1])
            gc.collect()
            assert outputs.pop()() is None and not outputs
        step.update()
    run.close()


def test_a_model_whose_logits_have_another_dtype_than_its_values_trains_in_packs(ranks):
    """GPT-J in bfloat16 takes its logits in float32."""
    ranks(1).run(check_logits_in_float32)


def check_logits_in_float32():
    model = built(
        "GPTJForCausalLM", vocab_size=VOCABULARY, n_embd=32, num_hidden_layers=3, n_head=4, n_positions=64, 
        rotary_dim=4, attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0,
    ).bfloat16()  # fmt: skip
    sequences = [torch.from_numpy(Source().tokens(number))[None] for number in range(len(LENGTHS))]
    counts = [length - 1 for length in LENGTHS]
    with torch.no_grad():
        losses = [float(model(input_ids=ids, labels=ids).loss) for ids in sequences]
    run = run_of(
        WrappedModel(model), start_world("cpu"), stream=Stream(), planner=plan_on(1, 1, 0),
        collator=PackCollator(source=Source(), objective=NEXT_TOKEN), optimizer=OptimizerSettings(),
        lr=lambda step: 0.0, clip_norm=0.0, num_steps=1,
    )  # fmt: skip
    for step in run.steps():
        for micro_batch in step:
            step.backward(run.model(**micro_batch.inputs).loss)
        assert step.update().loss == pytest.approx(np.average(losses, weights=counts), rel=IN_BFLOAT16)
    run.close()


def test_a_loss_that_is_not_finite_leaves_the_weights_as_they_were(ranks):
    ranks(2).run(check_not_finite)


def check_not_finite():
    run = make_run()
    before = [parameter.detach().clone() for parameter in run.model.parameters()]
    for step in run.steps():
        for micro_batch in step:
            step.backward(run.model(**micro_batch.inputs)[1] * float("inf"))
        with pytest.raises(LengthwiseError, match=r"step 0: loss inf and gradient norm .* are not both finite"):
            step.update()
        break
    for parameter, value in zip(run.model.parameters(), before):
        assert torch.equal(parameter, value)
    run.close()


def test_the_gradient_is_clipped_by_the_norm_of_the_whole_step(ranks):
    whole = ranks(1).run(clipped, 1)[0]
    for found in ranks(4).run(clipped, 2):
        for mine, theirs in zip(found, whole):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-11)


def clipped(degree):
    run = make_run(degree=degree, clip_norm=0.1, labels=labels_of)
    before = torch.cat([parameter.detach().flatten() for parameter in run.model.parameters()])
    for step in run.steps():
        compute(run, step)
        assert step.update().grad_norm > 0.1
    run.close()
    after = [parameter.detach().clone() for parameter in run.model.parameters()]
    change = torch.cat([weight.flatten() for weight in after]) - before
    assert float(change.norm()) == pytest.approx(0.1, rel=1e-4)
    return after


def test_plans_for_others_are_refused(ranks):
    ranks(1).run(check_plans)


def check_plans():
    for planner, message in (
        (plan_on(2, 1, 0), "plan for step 0 is for 2 ranks, the run has 1"),
        (with_layers(7), r"stages of \(7,\) layers, and the model has 3; plan again"),
    ):
        run = make_run()
        run.planner = planner
        with pytest.raises(InputError, match=message):
            next(run.steps())
        run.close()


def with_layers(number):
    from lengthwise.core.pipeline_config import uniform_scheme

    def plan(batch):
        made = plan_on(1, 1, 0)(batch)
        scheme = uniform_scheme(number, degree=1, stages=1, recomputed=0)
        return replace(made, pipelines=(replace(made.pipelines[0], scheme=scheme),))

    return plan


def test_the_model_is_given_back_as_it_was(ranks):
    ranks(1).run(check_given_back)


def check_given_back():
    run = make_run()
    tokens = torch.arange(5)[None] % VOCABULARY
    with pytest.raises(InputError, match="called outside of a micro-batch"):
        run.model(tokens, tokens)
    with run.plain() as model:
        expected = model(tokens, tokens)[0]
    run.close()
    assert "forward" not in vars(run.model) and all("forward" not in vars(layer) for layer in run.model.layers)
    assert torch.equal(run.model(tokens, tokens)[0], expected)
