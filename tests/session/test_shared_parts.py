"""Frozen models that share weights with the trained one, and models of one run in the micro-batches of another."""

import copy
from itertools import product

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional as F

import lengthwise as lw
from lengthwise.core.errors import InputError
from lengthwise.runtime.loop.shared_parts import check_shared_parts
from tests.runtime.harness import with_check
from tests.session.latents import planned
from tests.session.loops import as_started_by_torchrun
from tests.session.structure_runs import LR, OPTIONS

pytestmark = pytest.mark.usefixtures("unchecked")

EXACT, STEPS = 1e-10, 3
SIZES = {
    "vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
}  # fmt: skip
ROWS = [list(range(1 + i, 6 + 2 * i)) for i in range(5)]


def llama(seed):
    torch.manual_seed(seed)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).double()


def prepared(model, items=ROWS, **options):
    as_started_by_torchrun()
    return lw.prepare(model, items, **OPTIONS | {"sequences_per_step": len(ROWS), "steps": STEPS} | options)


def sharing():
    """A student and its teacher, which has its embedding, and as its own head the weights of the student's."""
    student, teacher = llama(0), llama(1)
    teacher.model.embed_tokens, teacher.lm_head.weight = student.model.embed_tokens, student.lm_head.weight
    return student, teacher


def divergence(logits, teachers):
    """[t] of each slot."""
    return F.kl_div(logits.log_softmax(-1), teachers.softmax(-1), reduction="none").sum(-1)


def descend(model, loss):
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= LR * parameter.grad
            parameter.grad = None


def distilled(kind):
    """How far a run with a teacher that shares trained weights is from a loop over single sequences."""
    student, teacher = sharing()
    alone, beside = copy.deepcopy((student, teacher))
    run, losses, expected = prepared(student, frozen=[teacher]), [], []
    for step in planned(run, kind).steps():
        for micro_batch in step:
            of_slots = divergence(student(**micro_batch.inputs).logits[0], teacher(**micro_batch.inputs).logits[0])
            step.backward(micro_batch.mean(of_slots, over="tokens"), mean_over="step")
        losses.append(step.update().loss)
        sums = []
        for row in ROWS:
            tokens = torch.tensor(row)[None]
            with torch.no_grad():
                teachers = beside(input_ids=tokens).logits
            sums.append(divergence(alone(input_ids=tokens).logits, teachers).sum())
        loss = sum(sums) / sum(map(len, ROWS))
        expected.append(loss.item())
        descend(alone, loss)
    run.close()
    assert teacher.model.embed_tokens is student.model.embed_tokens and not teacher.lm_head.weight.grad
    pairs = [*zip(student.parameters(), alone.parameters()), *zip(teacher.parameters(), beside.parameters())]
    return max(*(abs(a - b) for a, b in zip(losses, expected)), *(float((a - b).abs().max()) for a, b in pairs))


def distilled_all(kinds):
    return [distilled(kind) for kind in kinds]


def test_a_teacher_computes_with_the_weights_of_the_step_that_it_shares(ranks):
    for found in ranks(2).run(with_check, distilled_all, ("alone", "ring")):
        assert max(found) < EXACT


def test_logits_of_a_teacher_that_shares_trained_weights_are_refused_after_the_update():
    student, teacher = sharing()
    run = prepared(student, frozen=[teacher])
    step = next(run.steps())
    for micro_batch in step:
        logits = teacher(**micro_batch.inputs).logits
        step.backward(student(**micro_batch.inputs).loss)
    step.update()
    with pytest.raises(InputError, match=r"logits are first used when .* weights .* have changed"):
        logits.whole()
    run.close()


def shares_a_layer(student):
    teacher = llama(1)
    teacher.model.layers[0] = student.model.layers[0]
    return teacher


def shares_the_head(student):
    teacher = llama(1)
    teacher.lm_head = student.lm_head
    return teacher


class Around(nn.Module):
    def __init__(self, of):
        super().__init__()
        self.of = of

    def forward(self, input_ids, position_ids=None):
        return self.of(input_ids=input_ids, position_ids=position_ids).logits


REFUSED = {
    "a layer": (shares_a_layer, r"its part model\.layers\.0, is model\.layers\.0 of .*prepare one module that has"),
    "the head": (shares_the_head, r"its part lm_head, is lm_head of .*with the same weights: teacher\.head"),
    "all of it": (Around, r"Around, its part of.*, is all of LlamaForCausalLM.*prepare one module"),
    "the trained model": (lambda student: student, r"is the trained model, so it is no frozen one.*no_grad\(\)"),
    "a part of it": (lambda student: student.model, r"LlamaModel is a part of LlamaForCausalLM, the trained model"),
}


@pytest.fixture(scope="module")
def run():
    with prepared(llama(0)) as run:
        yield run


@pytest.mark.parametrize("case", REFUSED)
def test_what_computes_for_the_trained_model_alone_is_refused_by_name(run, case):
    make, said = REFUSED[case]
    before = copy.copy(vars(run.model))
    with pytest.raises(InputError, match=said) as refused:
        run.frozen(make(run.model))
    assert vars(run.model) == before and ("deepcopy" in str(refused.value)) is (
        case in ("the trained model", "a part of it")
    )


def test_weights_that_ranks_have_shares_of_are_refused_by_name():
    student, teacher = sharing()
    said = r"model\.embed_tokens\.weight of LlamaForCausalLM, which is frozen, is model\.embed.*weights='whole'"
    with pytest.raises(InputError, match=said):
        check_shared_parts(teacher, [student], by_layer=True)


def test_a_micro_batch_that_begins_within_another_runs_is_refused(run):
    with prepared(llama(1), steps=1) as other:
        first, second = next(run.steps()), next(other.steps())
        said = r"of the run of LlamaForCausalLM begins while one of .*go through all micro-batches of one run's step"
        with pytest.raises(InputError, match=said):
            for _ in zip(first, second):
                pass
    next(run.steps()).skip()


def total_logits(output, micro_batch):
    return micro_batch.per_sequence(output.logits[0].logsumexp(-1))


def exchanged():
    """How far actor and critic, each trained by a run with what the other says, are from plain loops."""
    models = llama(0), llama(1)
    alone = copy.deepcopy(models)
    columns = [{"input_ids": row, "weight": [1.0] * len(row)} for row in ROWS]
    runs = [prepared(model, columns, loss_columns=["weight"], steps=None) for model in models]
    rank, size = runs[0].world.rank, runs[0].world.size
    for _, (own, other) in product(range(2), ((0, 1), (1, 0))):
        items = columns[rank::size]
        scores = runs[other].score(items, total_logits, per="sequence")
        step = runs[own].step(
            [item | {"weight": [float(score)] * len(item["weight"])} for item, score in zip(items, scores)]
        )
        for micro_batch in step:
            logits_t = models[own](**micro_batch.inputs).logits[0]
            losses_t = F.cross_entropy(logits_t, micro_batch.labels, reduction="none")
            weighted_t = losses_t * micro_batch.column("weight")
            step.backward(micro_batch.mean(weighted_t, over="tokens"), mean_over="step")
        step.update()
        sums = []
        for row in ROWS:
            tokens = torch.tensor(row)[None]
            score = alone[other](input_ids=tokens).logits.detach().logsumexp(-1).sum()
            logits = alone[own](input_ids=tokens).logits[0, :-1]
            sums.append(F.cross_entropy(logits, tokens[0, 1:], reduction="sum") * score)
        descend(alone[own], sum(sums) / sum(map(len, ROWS)))
    for run in runs:
        run.close()
    pairs = [pair for model, plain in zip(models, alone) for pair in zip(model.parameters(), plain.parameters())]
    return max(float((a - b).detach().abs().max()) for a, b in pairs)


@pytest.mark.deep
def test_two_runs_that_exchange_scores_are_exact(ranks):
    assert max(ranks(2).run(with_check, exchanged)) < EXACT


def test_models_of_another_run_are_refused_in_a_micro_batch_and_as_frozen(run):
    reference = llama(2)
    with prepared(llama(1), frozen=[reference]) as other:
        said = r"LlamaForCausalLM.*prepared for another run.*run\.score\(items, \.\.\.\).*copy\.deepcopy\(model\)"
        for model in (other.model, reference):
            with pytest.raises(InputError, match=said):
                run.frozen(model)
            step = next(run.steps())
            with pytest.raises(InputError, match=said):
                for micro_batch in step:
                    model(**micro_batch.inputs)
        run.frozen(copy.deepcopy(reference))
