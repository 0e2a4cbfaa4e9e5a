"""What a loop does to a prepared model: changed weights are kept, everything else that would not train is refused."""

import pytest
import torch
from torch import nn

from lengthwise.core.errors import CheckError
from lengthwise.runtime.loop.watched_parameters import WatchedParameters
from tests.runtime.loop.loops import CHANGES, make_run, model_of, plain_loop, train_with_changes, weights_of


@pytest.fixture(scope="module")
def expected():
    return {name: plain_loop(change=change) for name, change in CHANGES.items()}


@pytest.mark.parametrize(
    ("num_ranks", "degree"), [(2, 1), *(pytest.param(n, n, marks=pytest.mark.deep) for n in (1, 3))]
)
def test_weights_that_a_loop_changes_on_every_rank_stay_changed(ranks, expected, num_ranks, degree, tmp_path):
    for found in ranks(num_ranks).run(train_with_changes, degree, tuple(CHANGES), torch.float64, tmp_path):
        for name, (losses, weights) in found.items():
            assert losses == pytest.approx(expected[name][0], abs=1e-10), name
            torch.testing.assert_close(weights, expected[name][1], rtol=0, atol=1e-10, msg=name)


def test_weights_in_bfloat16_keep_what_a_loop_changes_and_the_precision_of_the_rest(ranks):
    for num_ranks in (1, 2):
        for model, before, masters in ranks(num_ranks).run(change_one_weight):
            assert model == 0.5
            assert masters == before


def change_one_weight():
    model = model_of(torch.bfloat16)
    run = make_run(model, degree=1, lr=0.0)
    state = run.state
    state.master *= 1 + 2**-12  # below the precision of bfloat16
    with torch.no_grad():
        model.places.weight[3, 5] = 0.5
    number = state.table.slots["places.weight"].start + 3 * 24 + 5
    before = _whole_master(state)
    step_through(run)
    after, value = _whole_master(state), float(model.places.weight[3, 5].detach())
    assert after[number] == 0.5 != before[number]
    after[number] = before[number]
    run.close()
    return value, before, after


def _whole_master(state):
    rows = [torch.empty(0)] * state.world.size
    torch.distributed.all_gather_object(rows, (state.owned_layout.intervals[state.world.rank], state.master))
    whole = torch.empty(state.table.num_elements)
    for intervals, master in rows:
        at = 0
        for start, end in intervals:
            whole[start:end] = master[at : at + end - start]
            at += end - start
    return whole.tolist()


def step_through(run, num_steps=1):
    for step in run.steps():
        for micro_batch in step:
            step.backward(run.model(**micro_batch.inputs)[1])
        step.update()
        if step.number == num_steps - 1:
            return


def test_weights_that_one_rank_alone_changes_are_refused_on_all(ranks, tmp_path):
    ranks(2).run(check_one_rank_alone, tmp_path)


def check_one_rank_alone(folder):
    run = make_run(model_of(), degree=2)
    message = "the weights on rank 1 are not those on rank 0, so a loop changed them in some ranks alone"
    if run.world.rank == 1:
        run.model.tokens.weight.data[7, 7] += 1e-12
    with pytest.raises(CheckError, match=rf"run.save\(\): {message}"):
        run.save(folder)
    with pytest.raises(CheckError, match=f"step 0: {message}"):
        step_through(run)
    run.close()


def unfreeze(model):
    model.layers[0].up.bias.requires_grad_(True)


def freeze(model):
    model.tokens.weight.requires_grad_(False)


def grow(model):
    model.extra = nn.Linear(2, 2)


def replace(model):
    model.tokens.weight = nn.Parameter(model.tokens.weight.detach().clone())


def tie(model):
    model.layers[1].up.weight = model.layers[0].up.weight


def assign(model):
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)


def resize(model):
    model.tokens = nn.Embedding(70, 24).double()


REFUSED = {
    unfreeze: "the parameter layers.0.up.bias was unfrozen since the model was prepared",
    freeze: "the parameter tokens.weight was frozen since",
    grow: "the parameter extra.weight was added since",
    replace: "the parameter tokens.weight was replaced by another since",
    tie: "the parameter layers.1.up.weight is gone since",
    assign: r"the parameter tokens.weight was replaced .* as load_state_dict without assign=True",
    resize: "the parameter tokens.weight was replaced by another since",
    lambda model: model.float(): r"tokens.weight was torch.float64 \[61, 24\] on cpu when .* is torch.float32".replace(
        "torch.", ""
    ),
    lambda model: model.half(): "tokens.weight was float64 .* is float16",
}


@pytest.mark.first_cells(3)
@pytest.mark.parametrize(
    "change",
    [pytest.param(change, marks=[pytest.mark.deep] * (change is resize)) for change in REFUSED],
    ids=lambda change: change.__name__,
)
def test_parameters_that_would_not_train_are_refused_at_the_next_step_or_update(ranks, change):
    """Where one rank alone changes them, all ranks say so."""
    if change.__name__ == "<lambda>":
        check_refused(change)
    else:
        ranks(2).run(check_refused, change)


def check_refused(change):
    for is_in_step in (False, True):
        model = model_of()
        model.layers[0].up.bias.requires_grad_(False)
        run = make_run(model, degree=1)
        where = "" if run.world.size == 1 else "rank 0: "
        with pytest.raises(CheckError, match=f"step 0: {where}{REFUSED[change]}"):
            if run.world.is_first and not is_in_step:
                change(model)
            for step in run.steps():
                for micro_batch in step:
                    step.backward(model(**micro_batch.inputs)[1])
                if run.world.is_first and is_in_step:
                    change(model)
                step.update()
        run.close()


def clip(model, loss):
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def zero_one(model, loss):
    model.places.weight.grad.zero_()


def forget_one(model, loss):
    model.places.weight.grad = None


def replace_one(model, loss):
    model.places.weight.grad = torch.zeros_like(model.places.weight)


def own_backward(model, loss):
    loss.backward(retain_graph=True)


@pytest.mark.parametrize(
    ("change", "number"),
    [
        (clip, 2),
        (zero_one, 2),
        (forget_one, 2),
        *((change, n) for change in (replace_one, own_backward) for n in (0, 2)),
    ],
)
def test_gradients_that_a_loop_changes_are_refused(change, number):
    """Before the first backward, where that is more than clearing them, or between the last one and the update."""
    model = model_of()
    run = make_run(model, degree=1)
    says = "the gradient of places.weight was taken away" if "one" in change.__name__ else "gradients were changed"
    says = "gradients were changed between" if change is zero_one else says
    with pytest.raises(CheckError, match=says):
        for step in run.steps():
            for at, micro_batch in enumerate(step):
                loss = model(**micro_batch.inputs)[1]
                if at == number == 0:
                    change(model, loss)
                step.backward(loss) if at < 2 or change is not own_backward else None
                if at == number == 2:
                    change(model, loss)
                    step._current = None
                    step._shards[2].is_finished = True
            step.update()
    run.close()
    assert torch.isfinite(weights_of(model)).all()


def test_a_parameter_that_a_forward_froze_while_it_was_prepared_is_named():
    model = nn.Linear(2, 2)
    watched = WatchedParameters(model, trained=["weight", "bias"])
    assert not watched.problem()
    model.bias.requires_grad_(False)
    assert "the parameter bias was frozen" in watched.problem()
    assert "the parameter bias was frozen" in WatchedParameters(model, trained=["weight", "bias"]).problem()
