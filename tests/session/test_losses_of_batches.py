"""Losses that are no mean over the targets of a step, as some sequences alone do not show."""

import logging

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import lengthwise as lw
from lengthwise.core.errors import CheckError
from lengthwise.runtime.wrap.sequence_labels import with_label_of_sequence
from tests.session import models
from tests.session.loops import weights_of
from tests.session.structure_runs import LR, OPTIONS
from tests.session.test_prepare import assert_equal_weights

NOTED = "for several sequences at once is not the mean of theirs by their targets"


def rows(lowest=0):
    return [np.random.default_rng(n).integers(lowest, models.VOCAB, length) for n, length in enumerate((13, 5, 21, 9))]


class Counted(models.GPT):
    """Leaves tokens 0 out, and says so to cross_entropy alone."""

    def forward(self, idx, targets=None):
        logits, _ = super().forward(idx)
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.clamp(min=0).flatten(), ignore_index=0)


class Classes(models.GPT):
    """Weighs classes, all but the first alike."""

    def __init__(self):
        super().__init__()
        self.register_buffer("weights", torch.ones(models.VOCAB).index_fill(0, torch.tensor([0]), 5.0))

    def forward(self, idx, targets=None):
        logits, _ = super().forward(idx)
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten(), weight=self.weights.to(logits))


class AtLeast(models.GPT):
    """Divides by eight where there are fewer targets."""

    def forward(self, idx, targets=None):
        logits, _ = super().forward(idx)
        total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        return logits, total / (targets != -100).sum().clamp(min=8)


def prepared(kind, items, **options):
    torch.manual_seed(0)
    model = kind().double()
    return lw.prepare(model, items, **OPTIONS | {"sequences_per_step": len(items), "steps": 1} | options), model


def compute(run, model):
    for step in run.steps():
        for micro_batch in step:
            step.backward(model(**micro_batch.inputs)[1])
        step.update()
    run.close()
    return weights_of(model)


def test_a_label_that_the_loss_leaves_out_and_the_step_counts_is_refused_when_it_comes(ranks):
    run, model = prepared(Counted, rows(lowest=1), step_max_length=40)
    with pytest.raises(CheckError, match=r"the items have 1 token that no example had \(0; "):
        run.step([np.array([3, 4, 0, 5, 6])])
    run.changes_of_items = None  # as at a step between two comparisons
    step = run.step([np.array([3, 4, 0, 5, 6])])
    with pytest.raises(CheckError, match=r"a token has the label 0, .* of Counted leaves out .*ignore_index=0\)"):
        for micro_batch in step:
            step.backward(model(**micro_batch.inputs)[1])
    run.close()


def test_a_label_that_is_known_to_be_left_out_weighs_nothing():
    run, model = prepared(Counted, rows(), ignore_index=0)
    torch.manual_seed(0)
    alone = Counted().double()
    tokens = [torch.as_tensor(row) for row in rows()]
    losses = [F.cross_entropy(alone(x[None])[0][0, :-1], x[1:], ignore_index=0, reduction="sum") for x in tokens]
    (sum(losses) / sum(int((x[1:] != 0).sum()) for x in tokens)).backward()
    torch.optim.SGD(alone.parameters(), lr=LR).step()
    assert_equal_weights(compute(run, model), weights_of(alone))


@pytest.mark.parametrize("kind", [pytest.param(Classes, marks=pytest.mark.deep), AtLeast])
def test_a_loss_with_a_divisor_of_its_own_is_said_to_train_the_mean_of_its_sequences(kind, caplog):
    items = [np.where(np.arange(len(row)) == 2, 0, row) for row in rows()]  # a class of another weight in each
    run, model = prepared(kind, items)
    said = [record.getMessage() for record in caplog.records]
    assert sum(NOTED in line for line in said) == 1 and not any("sequence by sequence: exact" in line for line in said)
    torch.manual_seed(0)
    alone = kind().double()
    total = sum(len(row) - 1 for row in items)
    for row in items:
        tokens = torch.as_tensor(row)[None]
        targets = torch.cat([tokens[:, 1:], torch.full((1, 1), -100)], 1)
        (alone(tokens, targets)[1] * (len(row) - 1) / total).backward()
    torch.optim.SGD(alone.parameters(), lr=LR).step()
    run.compare()
    assert_equal_weights(compute(run, model), weights_of(alone))


def test_a_class_of_another_weight_is_refused_when_it_comes_if_no_example_has_it():
    run, model = prepared(Classes, rows(lowest=1), step_max_length=40, packing="always")
    with pytest.raises(CheckError, match=r"the items have 1 token that no example had \(0; "):
        run.step([np.array([3, 4, 0, 5, 6])])
    run.changes_of_items = None  # as at a step between two comparisons
    step = run.step([np.array([3, 4, 0, 5, 6])])
    with pytest.raises(CheckError, match=r"a token has the label 0, .* of Classes leaves out or weighs otherwise"):
        for micro_batch in step:
            step.backward(model(**micro_batch.inputs)[1])
    run.close()


@pytest.mark.parametrize("kind", [pytest.param(models.GPT, marks=pytest.mark.deep), Counted])
def test_a_mean_over_targets_is_one_sequence_by_sequence_too(kind, caplog):
    with caplog.at_level(logging.INFO, logger="lengthwise"):
        run, _ = prepared(kind, rows(lowest=1), packing="never")
    run.close()
    assert not any(NOTED in record.getMessage() for record in caplog.records)


class Contrastive(models.GPT):
    """Adds a term of zero for one sequence: which of the batch's inputs is its own."""

    def forward(self, idx, targets=None):
        logits, loss = super().forward(idx, targets)
        pooled, of_inputs = (F.normalize(x.mean(1), dim=-1) for x in (logits, F.one_hot(idx, models.VOCAB).to(logits)))
        return logits, loss + F.cross_entropy(pooled @ of_inputs.T, torch.arange(len(idx)))


class GradientAcross(models.GPT):
    """Adds a term that is zero in value, and in gradient for one sequence."""

    def forward(self, idx, targets=None):
        logits, loss = super().forward(idx, targets)
        across = (logits.mean(1) - logits.mean((0, 1))).square().sum()
        return logits, loss + across - across.detach()


class Centred(models.GPT):
    """Centres its outputs by the mean of the batch."""

    def forward(self, idx, targets=None):
        logits, _ = super().forward(idx)
        pooled = logits.mean(1, keepdim=True)
        logits = logits + pooled - pooled.mean(0)
        return logits, None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class RowMeans(models.GPT):
    """The mean over rows of the mean of each."""

    def forward(self, idx, targets=None):
        logits, _ = super().forward(idx)
        losses = F.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
        return logits, (losses.sum(1) / (targets != -100).sum(1)).mean()


class BatchNorm(models.GPT):
    """Normalises its outputs over the batch."""

    def __init__(self):
        super().__init__()
        self.norm_of_batch = torch.nn.BatchNorm1d(models.VOCAB, track_running_stats=False)

    def forward(self, idx, targets=None):
        logits = self.norm_of_batch(super().forward(idx)[0].transpose(1, 2)).transpose(1, 2)
        return logits, None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class SmallTerm(models.GPT):
    """Adds a term of all tokens that is less than a ten-thousandth of the loss."""

    def forward(self, idx, targets=None):
        logits, loss = super().forward(idx, targets)
        shares = logits.softmax(-1).mean((0, 1))
        return logits, loss + 1e-4 * (shares * shares.log()).sum()


class Frequent(models.GPT):
    """Divides gradients of an embedding by how often a token comes in the batch."""

    def __init__(self):
        super().__init__()
        self.scaled = torch.nn.Embedding(models.VOCAB, models.VOCAB, scale_grad_by_freq=True)

    def forward(self, idx, targets=None):
        logits = super().forward(idx)[0] + self.scaled(idx)
        return logits, None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Scored(models.GPT):
    """Has one number for each sequence."""

    def forward(self, idx, score=None):
        pooled = super().forward(idx)[0].mean((1, 2))
        return pooled, None if score is None else F.mse_loss(pooled, score.to(pooled))


class OneAtATime(BatchNorm):
    """Takes one sequence."""

    def forward(self, idx, targets=None):
        assert len(idx) == 1
        return super().forward(idx, targets)


def of_output(output, micro_batch):
    return F.cross_entropy(output[0][0], micro_batch.labels)


def said_of(kind, caplog, **options):
    """How a model is computed, and what is said of it."""
    run, _ = prepared(kind, rows(lowest=1), **options)
    by_sequence = run.wrapped_model.by_sequence is not None
    run.close()
    return by_sequence, [record.getMessage() for record in caplog.records]


@pytest.mark.first_cells(1)
@pytest.mark.parametrize(
    ("kind", "loss"),
    [
        (Contrastive, None),
        (GradientAcross, None),
        (Centred, of_output),
        pytest.param(RowMeans, None, marks=pytest.mark.deep),
        pytest.param(Centred, None, marks=pytest.mark.deep),
    ],
)
def test_packs_of_a_model_whose_loss_of_a_batch_is_another_are_warned_of(kind, loss, caplog):
    by_sequence, said = said_of(kind, caplog, loss=loss)
    assert not by_sequence and sum(NOTED in line for line in said) == 1


@pytest.mark.first_cells(1)
@pytest.mark.parametrize("balances", [False, True])
def test_experts_are_warned_of_once_if_their_balance_is_part_of_the_loss(balances, caplog):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 2}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.1}
    config = transformers.MixtralConfig(vocab_size=models.VOCAB, num_hidden_layers=2, **sizes, **experts)
    config.output_router_logits = balances
    torch.manual_seed(0)
    options = OPTIONS | {"sequences_per_step": 4, "steps": 1}
    lw.prepare(transformers.MixtralForCausalLM(config), rows(), **options).close()
    assert sum(NOTED in record.getMessage() for record in caplog.records) == balances


def test_a_batch_of_a_classifier_has_the_label_of_each_of_its_sequences():
    label_of = with_label_of_sequence(lambda labels: labels)
    assert label_of(labels=torch.tensor([[-100, 2], [1, -100]])).tolist() == [2, 1]


@pytest.mark.parametrize("loss", [pytest.param(None, marks=pytest.mark.deep), of_output])
def test_packs_of_a_mean_over_targets_are_not_warned_of(loss, caplog):
    by_sequence, said = said_of(models.GPT, caplog, loss=loss)
    assert not by_sequence and not any(NOTED in line for line in said)


@pytest.mark.first_cells(1)
@pytest.mark.parametrize(
    ("kind", "loss"),
    [
        (BatchNorm, None),
        (SmallTerm, None),
        pytest.param(Frequent, None, marks=pytest.mark.deep),
        pytest.param(BatchNorm, of_output, marks=pytest.mark.deep),
    ],
)
def test_a_batch_that_learns_something_else_is_not_called_exact_sequence_by_sequence(kind, loss, caplog):
    by_sequence, said = said_of(kind, caplog, loss=loss)
    assert by_sequence and sum(NOTED in line for line in said) == 1
    assert not any("sequence by sequence: exact" in line for line in said)


def test_a_model_that_takes_one_sequence_alone_is_not_said_to_be_exact(caplog):
    by_sequence, said = said_of(OneAtATime, caplog)
    assert by_sequence and not any(NOTED in line for line in said)
    assert any("could not be seen" in line for line in said) and not any("sequence: exact" in line for line in said)


def test_one_label_a_sequence_that_is_weighted_by_its_tokens_is_not_said_to_be_exact(caplog):
    torch.manual_seed(0)
    items = [{"input_ids": row, "score": float(number)} for number, row in enumerate(rows())]
    options = OPTIONS | {"sequences_per_step": len(items), "steps": 1, "objective": "every-token"}
    inputs = {"inputs": lambda micro_batch: {
        "idx": micro_batch.tokens[None], "score": micro_batch.column_by_sequence("score")
    }, "loss_columns": ("score",)}  # fmt: skip
    lw.prepare(Scored().double(), items, **options | inputs).close()
    said = [record.getMessage() for record in caplog.records]
    assert any("weighted by its targets" in line for line in said)


def test_a_term_across_sequences_that_a_loop_switches_on_is_warned_of(caplog):
    class Scheduled(GradientAcross):
        is_on = False

        def forward(self, idx, targets=None):
            return super().forward(idx, targets) if self.is_on else models.GPT.forward(self, idx, targets)

    run, model = prepared(Scheduled, rows(lowest=1))
    assert not any(NOTED in record.getMessage() for record in caplog.records)
    model.is_on = True
    run.compare()
    run.close()
    assert sum(NOTED in record.getMessage() for record in caplog.records) == 1


class RowSums(models.GPT):
    """Its loss is the mean over rows of their sums, and knows no label that is left out."""

    def forward(self, idx, targets=None):
        logits, _ = super().forward(idx)
        picked = logits.log_softmax(-1).gather(-1, targets[..., None])
        return logits, -picked.sum((1, 2)).mean()


@pytest.mark.first_cells(1)
@pytest.mark.parametrize(("kind", "said"), [(RowMeans, NOTED), (RowSums, "could not be seen"), (models.GPT, "")])
def test_tags_of_all_tokens_do_not_hide_that_rows_weigh_alike(kind, said, caplog):
    torch.manual_seed(0)
    items = [{"input_ids": row, "labels": row % 5} for row in map(np.asarray, rows(lowest=1))]
    settings = OPTIONS | {"sequences_per_step": len(items), "steps": 1, "objective": "every-token"}
    lw.prepare(kind().double(), items, **settings).close()
    assert said in caplog.text and (said == NOTED) == (NOTED in caplog.text)
    assert kind is not RowSums or "sequence by sequence: exact" not in caplog.text


class OfFirstRow(models.GPT):
    """Takes one sequence at a time: it reads the first row alone."""

    def forward(self, idx, targets=None):
        logits, _ = super().forward(idx[:1])
        return logits, None if targets is None else F.cross_entropy(logits[0], targets[0])


class OfFirstPrefix(models.GPT):
    """Reads of one argument the first row alone, whose tokens have another embedding."""

    def forward(self, idx, targets=None, kind=None):
        logits, _ = super().forward(torch.where(kind[0] == 1, (idx + 7) % models.VOCAB, idx))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@pytest.mark.parametrize("kind", [OfFirstRow, OfFirstPrefix])
def test_a_loss_of_which_several_sequences_are_no_batch_is_not_said_to_be_another(kind, caplog):
    items = rows()
    if kind is OfFirstPrefix:
        items = [{"input_ids": row.tolist(), "kind": (row % 2).tolist()} for row in items]
    run, _ = prepared(kind, items, packing="never")
    run.close()
    assert run.wrapped_model.is_mean is None
    assert not any(NOTED in record.getMessage() for record in caplog.records)
