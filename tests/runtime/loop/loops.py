"""Loops of users who do what a loop may do: catch errors, leave steps, change weights; on every rank of a pool."""

from functools import cache, partial
from unittest import mock

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from lengthwise.config.optimizer_settings import OptimizerSettings
from lengthwise.core.batch import NEXT_TOKEN
from lengthwise.core.errors import InputError, LengthwiseError
from lengthwise.runtime.comm.world import start_world
from lengthwise.runtime.verify.stage_check import check_stages
from lengthwise.runtime.wrap.collator import PackCollator
from lengthwise.runtime.wrap.wrapped_model import WrappedModel
from tests.runtime.harness import where_asked
from tests.runtime.loop import memory_runs
from tests.runtime.loop.memory_runs import LENGTHS, Model, Source, Stream, plan_on, run_of

LR, STEPS = 0.02, 3


def model_of(dtype=torch.float64):
    torch.manual_seed(0)
    return Model().to(dtype)


def make_run(model, *, degree, num_steps=STEPS, recomputed=0, labels=None, lr=LR, by_layer=False, stages=1, scale=None):
    world = start_world("cpu")
    run = run_of(
        WrappedModel(model), world, stream=Stream(), planner=plan_on(world.size, degree, recomputed, stages=stages),
        collator=PackCollator(source=Source(), objective=NEXT_TOKEN, labels=labels),
        optimizer=OptimizerSettings(name="sgd", momentum=0.0, weight_decay=0.0, loss_scale=scale),
        lr=lambda step: lr, clip_norm=0.0, num_steps=num_steps,
    )  # fmt: skip
    run.check_stages = partial(where_asked, check_stages, run)
    if by_layer:
        run.gather_by_layer()
    return run


def weights_of(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@cache
def plain_loop(*, num_steps=STEPS, change=None, dtype=torch.float64):
    """Losses and weights of the loop that a user has on one device; ``change(model, step)`` after each update."""
    model, losses = model_of(dtype), []
    for step in range(num_steps):
        total, count = torch.zeros((), dtype=dtype), 0
        for sequence in range(len(LENGTHS)):
            tokens = torch.from_numpy(Source().tokens(sequence))
            logits = model(tokens[None], tokens[None])[0][0, :-1]
            total, count = total + F.cross_entropy(logits, tokens[1:], reduction="sum"), count + len(tokens) - 1
        (total / count).backward()
        losses.append(float(total.detach()) / count)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= LR * parameter.grad
                parameter.grad = None
        if change is not None:
            change(model, step)
    return losses, weights_of(model)


class TroubleError(Exception):
    """What a loop runs into."""


def fail_in_backward(weight):
    """Raise an error when the gradient of a weight comes, once."""

    def fail(gradient):
        hook.remove()
        raise TroubleError

    hook = weight.register_hook(fail)


def train_through_trouble(degree, recomputed, place, troubled, *, by_layer=False, stages=1):
    """A loop that catches its errors and goes on; in its first step, ranks of ``troubled`` run into one at a place.

    Returns losses, weights, and what each update that raised said.
    """
    model, losses, said = model_of(), [], []
    run = make_run(model, degree=degree, recomputed=recomputed, by_layer=by_layer, stages=stages)
    has_trouble = run.world.rank in troubled
    for step in run.steps():
        try:
            for number, micro_batch in enumerate(step):
                wants = has_trouble and step.attempt == 0 and step.number == 1
                if wants and place == "before the forward" and number == 0:
                    raise TroubleError
                loss = model(**micro_batch.inputs)[1]
                if wants and place == "before the backward" and number == 0:
                    raise TroubleError
                if wants and place == "in the backward" and number == 0:
                    fail_in_backward(model.layers[len(model.layers) // 2].down.weight)
                if wants and place == "the loss":
                    loss = loss * float("nan")
                step.backward(loss)
                if wants and place == "after the backward":
                    raise TroubleError
            if wants and place == "the update":
                continue
            losses.append(step.update().loss)
        except TroubleError:
            continue
        except LengthwiseError as error:
            said.append(str(error))
    run.close()
    return losses, weights_of(model), said


def train_with_overflow(degree, *, by_layer=False, stages=1):
    """Losses, weights and which steps were skipped, of a loop whose losses are scaled and whose last rank overflows."""
    model, losses, skipped = model_of(), [], []
    run = make_run(model, degree=degree, by_layer=by_layer, stages=stages, scale=256.0)
    for step in run.steps():
        for micro_batch in step:
            loss = model(**micro_batch.inputs)[1]
            step.backward(loss)
        if step.number == 1 and run.world.rank == run.world.size - 1:
            run.state.pushed[:1] = float("inf")
        result = step.update()
        losses.append(result.loss)
        skipped.append(result.is_skipped)
    assert run.state.loss_scaler.scale == 128.0 and not run.skipped
    run.close()
    return losses, weights_of(model), skipped


def labels_of_some(sequence):
    """The targets of the first sequence are in its first half, so that not every rank has some."""
    tokens = Source().tokens(sequence).astype(np.int64)
    return np.where((sequence == 0) & (np.arange(len(tokens)) > 5), -100, tokens)


def clamp(model, step):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.clamp_(-0.15, 0.15)


def clamp_data(model, step):
    for parameter in model.parameters():
        parameter.data.clamp_(-0.15, 0.15)


def load(model, step):
    if step == 1:
        torch.manual_seed(1)
        model.load_state_dict(Model().to(next(model.parameters()).dtype).state_dict())


def replace_data(model, step):
    vector = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    torch.nn.utils.vector_to_parameters(0.9 * vector, model.parameters())


CHANGES = {"clamp": clamp, "data": clamp_data, "load_state_dict": load, "vector_to_parameters": replace_data}


def train_with_changes(degree, names, dtype, folder):
    """By name: losses and weights of a loop that changes weights by hand; its last step is of a resumed run."""
    found = {}
    for name in names:
        model, losses = model_of(dtype), []
        run = make_run(model, degree=degree)
        for step in run.steps():
            for micro_batch in step:
                step.backward(model(**micro_batch.inputs)[1])
            losses.append(step.update().loss)
            CHANGES[name](model, step.number)
            if step.number == STEPS - 2:
                run.save(folder / name)
                break
        run.close()
        model = model_of(dtype)
        run = make_run(model, degree=degree)
        run.resume(folder / name)
        for step in run.steps():
            for micro_batch in step:
                step.backward(model(**micro_batch.inputs)[1])
            losses.append(step.update().loss)
            CHANGES[name](model, step.number)
        run.close()
        found[name] = losses, weights_of(model)
    return found


def masked_mean(logits, targets):
    """A mean over targets that is 0 / 0 without any, and so is its gradient."""
    mask = targets != -100
    losses = F.cross_entropy(logits[0], targets.clamp(min=0), reduction="none")
    return (losses * mask).sum() / mask.sum()


def train_with_masked_mean(degree, recomputed):
    """One step with a loss that is NaN on ranks whose tokens have no target; how many of those there were."""
    model = model_of()
    run = make_run(model, degree=degree, recomputed=recomputed, labels=labels_of_some, num_steps=1)
    run.wrapped_model._loss = lambda output, micro_batch: masked_mean(output[0], micro_batch.targets)
    num_without = 0
    for step in run.steps():
        for micro_batch in step:
            loss = masked_mean(model(**micro_batch.inputs)[0], micro_batch.targets)
            num_without += bool(loss.isnan())
            step.backward(loss)
        result = step.update()
    run.close()
    return result.loss, weights_of(model), num_without


def masked_mean_alone():
    model = model_of()
    total, count = torch.zeros((), dtype=torch.float64), 0
    for sequence in range(len(LENGTHS)):
        tokens, labels = torch.from_numpy(Source().tokens(sequence)), torch.from_numpy(labels_of_some(sequence))
        logits = model(tokens[None], tokens[None])[0][0, :-1]
        total = total + F.cross_entropy(logits, labels[1:], reduction="sum")
        count += int((labels[1:] != -100).sum())
    (total / count).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= LR * parameter.grad
    return float(total.detach()) / count, weights_of(model)


def pieces(logits, targets):
    """Per token: its loss (0 without a target), the entropy of its prediction, and the size of its logits."""
    losses = F.cross_entropy(logits[0], targets, reduction="none", ignore_index=-100)
    probabilities = logits[0].softmax(-1)
    return losses, -(probabilities * probabilities.log()).sum(-1), logits[0].square().mean(-1)


def train_with_terms(degree, how, labelled):
    """One step whose loss has means over targets, tokens and sequences, given in one of several ways."""
    model = model_of()
    run = make_run(model, degree=degree, labels=labels_of_some if labelled else None, num_steps=1)
    run.counts_targets = labelled
    for step in run.steps():
        for micro_batch in step:
            logits, loss = model(**micro_batch.inputs)
            losses, entropy, size = pieces(logits, micro_batch.targets)
            by_token, by_sequence = (
                micro_batch.mean(entropy, over="tokens"),
                micro_batch.mean(size[None], over="sequences"),
            )
            if how == "side":
                step.backward(loss, side=0.3 * by_token + 0.2 * by_sequence)
            elif how == "declared":
                mean = losses.sum() / micro_batch.num_targets  # 0 / 0 where there are none
                step.backward(mean * 1.0, mean_over="targets", side=0.3 * by_token + 0.2 * by_sequence)
            elif how == "tokens":
                side = micro_batch.mean(losses, over="targets") + 0.2 * by_sequence
                step.backward(0.3 * entropy.mean(), mean_over="tokens", side=side)
            else:
                whole = micro_batch.mean(losses, over="targets") + 0.3 * by_token + 0.2 * by_sequence
                step.backward(whole, mean_over="step")
        result = step.update()
    run.close()
    return result.loss, weights_of(model)


def terms_alone(labelled):
    model = model_of()
    losses, entropies, sizes, count = [], [], [], 0
    for sequence in range(len(LENGTHS)):
        tokens = torch.from_numpy(Source().tokens(sequence))
        labels = torch.from_numpy(labels_of_some(sequence)) if labelled else tokens
        targets = torch.cat([labels[1:], torch.tensor([-100])])
        made = pieces(model(tokens[None], tokens[None])[0], targets)
        losses, entropies, sizes = [*losses, made[0].sum()], [*entropies, made[1]], [*sizes, made[2].mean()]
        count += int((targets != -100).sum())
    total = sum(losses) / count + 0.3 * torch.cat(entropies).mean() + 0.2 * torch.stack(sizes).mean()
    total.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= LR * parameter.grad
    return float(total.detach()), weights_of(model)


def teacher_of():
    torch.manual_seed(9)
    return Model().double()


def distil(logits, others):
    return F.kl_div(logits[0].log_softmax(-1), others[0].log_softmax(-1), reduction="none", log_target=True).sum(-1)


def train_with_teacher(degree, recomputed, fails):
    """Two steps of distillation; ranks run out of memory at some places of the first."""
    model, teacher = model_of(), teacher_of()
    run = make_run(model, degree=degree, recomputed=recomputed, num_steps=2)
    run.frozen(teacher)
    run.on_oom = lambda step, failures: None
    before = weights_of(teacher)
    for step in run.steps():
        memory_runs._fails_at.clear()
        if step.number == step.attempt == 0:
            memory_runs._fails_at.update(fails.get(run.world.rank, ()))
        for micro_batch in step:
            first = teacher(**micro_batch.inputs)[0] if micro_batch.pack.ids[0] % 2 else None
            logits, loss = model(**micro_batch.inputs)
            others = teacher(**micro_batch.inputs)[0] if first is None else first
            assert fails or not others.requires_grad
            step.backward(loss, side=micro_batch.mean(distil(logits, others), over="tokens"))
        step.update()
    memory_runs._fails_at.clear()
    run.close()
    assert torch.equal(before, weights_of(teacher)) and "forward" not in vars(teacher)
    return weights_of(model)


def teacher_alone():
    model, teacher = model_of(), teacher_of()
    for _ in range(2):
        total, count, distances = torch.zeros((), dtype=torch.float64), 0, []
        for sequence in range(len(LENGTHS)):
            tokens = torch.from_numpy(Source().tokens(sequence))
            logits, others = model(tokens[None], tokens[None])[0], teacher(tokens[None], tokens[None])[0].detach()
            total = total + F.cross_entropy(logits[0, :-1], tokens[1:], reduction="sum")
            count, distances = count + len(tokens) - 1, [*distances, distil(logits, others)]
        (total / count + torch.cat(distances).mean()).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= LR * parameter.grad
                parameter.grad = None
    return weights_of(model)


def train_with_two_forwards(degree, recomputed, fails):
    """Two steps in which the model is called twice: by itself as its reference, and twice with gradients."""
    model = model_of()
    run = make_run(model, degree=degree, recomputed=recomputed, num_steps=2)
    run.on_oom = lambda step, failures: None
    for step in run.steps():
        memory_runs._fails_at.clear()
        if step.number == step.attempt == 0:
            memory_runs._fails_at.update(fails.get(run.world.rank, ()))
        for micro_batch in step:
            with torch.no_grad():
                others = model(**micro_batch.inputs)[0]
            first, second = model(**micro_batch.inputs), model(**micro_batch.inputs)
            side = micro_batch.mean((first[0] * others).mean(-1) + second[0].square().mean(-1), over="tokens")
            step.backward((first[1] + 2 * second[1]) / 3, mean_over="targets", side=side)
        step.update()
    memory_runs._fails_at.clear()
    run.close()
    return weights_of(model)


def two_forwards_alone():
    model = model_of()
    for _ in range(2):
        total, count, sides = torch.zeros((), dtype=torch.float64), 0, []
        for sequence in range(len(LENGTHS)):
            tokens = torch.from_numpy(Source().tokens(sequence))
            logits = model(tokens[None], tokens[None])[0]
            total = total + F.cross_entropy(logits[0, :-1], tokens[1:], reduction="sum")
            count += len(tokens) - 1
            sides.append(((logits * logits.detach()).mean(-1) + logits.square().mean(-1))[0])
        (total / count + torch.cat(sides).mean()).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= LR * parameter.grad
                parameter.grad = None
    return weights_of(model)


def couple(sums, others):
    """A loss of each sequence that its slots do not add up to."""
    return torch.tanh(sums / 50 - others / 50).square()


def train_with_sums(degree, recomputed, fails, teacher_first):
    """Two steps of a loss over sums by sequence of the model and of a teacher without gradients; the void steps."""
    model, teacher = model_of(), teacher_of().requires_grad_(False)
    run, void = make_run(model, degree=degree, recomputed=recomputed, num_steps=2), []
    run.frozen(teacher)
    run.on_oom = lambda step, failures: void.append(step.number)
    for step in run.steps():
        memory_runs._fails_at.clear()
        if step.number == step.attempt == 0:
            memory_runs._fails_at.update(fails.get(run.world.rank, ()))
        for micro_batch in step:
            called = [
                micro_batch.per_sequence(each(**micro_batch.inputs)[0].logsumexp(-1))
                for each in ((teacher, model) if teacher_first else (model, teacher))
            ]
            others, sums = called if teacher_first else reversed(called)
            (mine,), (theirs,) = ((x[micro_batch.units].unbind(1)) for x in (sums, others))
            step.backward(couple(mine, theirs).mean(), mean_over="units")
        step.update()
    memory_runs._fails_at.clear()
    run.close()
    return weights_of(model), void


def sums_alone():
    model, teacher = model_of(), teacher_of()
    for _ in range(2):
        losses = []
        for sequence in range(len(LENGTHS)):
            tokens = torch.from_numpy(Source().tokens(sequence))[None]
            sums, others = (each(tokens, tokens)[0][0].logsumexp(-1).sum() for each in (model, teacher))
            losses.append(couple(sums, others.detach()))
        torch.stack(losses).mean().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= LR * parameter.grad
                parameter.grad = None
    return weights_of(model)


def train_with_other_calls(degree):
    """What a rank is told whose values have another shape than those of the other ranks of its group."""
    run = make_run(model_of(), degree=degree, num_steps=1)
    with pytest.raises(InputError) as refused:
        for step in run.steps():
            for micro_batch in step:
                logits = run.model(**micro_batch.inputs)[0][0]
                micro_batch.per_sequence(logits if run.world.rank else logits[:, 0])
    run.close()
    return str(refused.value)


def with_plans_changed(change, function, *arguments, **options):
    """What ``function`` gives where every plan by hand is changed."""
    unchanged = plan_on  # which is replaced by its name

    def planner(*how, **more):
        plan = unchanged(*how, **more)
        return lambda batch: change(plan(batch))

    with mock.patch(f"{__name__}.plan_on", planner), mock.patch.object(memory_runs, "plan_on", planner):
        return function(*arguments, **options)
