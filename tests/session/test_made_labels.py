"""Labels that ``inputs=`` makes have their own number of targets; losses that are sums over them are refused."""

import copy

import numpy as np
import pytest
import torch
import transformers
from torch.nn import functional as F

import lengthwise as lw
from lengthwise.core.errors import CheckError
from tests.session.loops import step_through
from tests.session.structure_runs import OPTIONS, rows
from tests.session.structures import Plain

VOCAB, LR = 71, 1.0
OPTIONS_OF_LOSS = OPTIONS | {"lr": LR}
SAME = 1e-6
"""Losses of transformers are float32, and so are the weights that they are multiplied by."""


def prompt_hidden(tokens):
    """Each token's own label; a prompt of its own length has none."""
    return torch.where(torch.arange(len(tokens)) < int(tokens[0]) % len(tokens) // 2 + 1, -100, tokens)


def few_of(tokens):
    """Labels of a decoder, fewer than there are tokens."""
    return tokens[: 1 + int(tokens[0]) % 5]


def llama():
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=VOCAB, **sizes))


def t5():
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 2, "num_heads": 2, "dropout_rate": 0.0}
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=VOCAB, decoder_start_token_id=0, **sizes)
    )


def trained(model, labels_of, **options):
    """The rows that a model was trained on for a step, by ``inputs=`` that make labels."""
    tokens = [torch.as_tensor(np.asarray(row)) for row in rows()]

    def inputs(micro_batch):
        labels = torch.cat([labels_of(torch.as_tensor(np.asarray(row))) for row in micro_batch.sequences])
        return {"input_ids": micro_batch.tokens[None], "labels": labels[None]}

    run = lw.prepare(model, rows(), steps=1, inputs=inputs, **OPTIONS_OF_LOSS | options)
    for step in run.steps():
        for micro_batch in step:
            step.backward(model(**micro_batch.inputs).loss)
        loss = step.update().loss
    run.close()
    return tokens, loss


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("make", "labels_of", "drops"), [(llama, prompt_hidden, 1), (t5, few_of, 0)], ids=["hidden prompts", "a decoder's"]
)
def test_labels_that_inputs_makes_weigh_as_many_as_they_are(make, labels_of, drops):
    torch.manual_seed(0)
    model = make().double()
    stock = copy.deepcopy(model)
    tokens, loss = trained(model, labels_of)
    counts = [int((labels_of(row)[drops:] != -100).sum()) for row in tokens]
    expected = 0.0
    for row, count in zip(tokens, counts):
        term = stock(input_ids=row[None], labels=labels_of(row)[None]).loss * count / sum(counts)
        term.backward()
        expected += float(term.detach())
    assert loss == pytest.approx(expected, rel=SAME)
    pairs = zip(stock.parameters(), model.parameters())
    off = max(float((p - LR * p.grad - q).detach().abs().max()) for p, q in pairs if p.grad is not None)
    assert off < SAME * max(float(p.grad.abs().max()) for p in stock.parameters() if p.grad is not None)


class Weighed(Plain):
    """A mean weighted by class is none over targets."""

    def end(self, x, targets):
        logits, loss = super().end(x, targets)
        if targets is not None:
            classes = torch.linspace(0.5, 2.0, logits.shape[-1], dtype=logits.dtype)
            loss = F.cross_entropy(logits[0], targets[0], weight=classes, ignore_index=-100)
        return logits, loss


class Summed(Plain):
    def end(self, x, targets):
        logits, loss = super().end(x, targets)
        if targets is not None:
            loss = F.cross_entropy(logits[0], targets[0], reduction="sum", ignore_index=-100)
        return logits, loss


class SummedBesideAnother(Summed):
    def end(self, x, targets):
        logits, loss = super().end(x, targets)
        return logits, None if loss is None else loss + 0.5


def test_other_labels_of_a_loss_that_is_no_mean_over_them_are_refused_in_the_step():
    def inputs(micro_batch):
        return {
            "idx": micro_batch.tokens[None],
            "targets": micro_batch.targets.masked_fill(micro_batch.positions == 1, -100)[None],
        }

    model = Weighed().double()
    run = lw.prepare(model, rows(), steps=1, packing="never", inputs=inputs, **OPTIONS)
    with pytest.raises(CheckError, match=r"called with labels that have .* targets, and its micro-batch has"):
        for step in run.steps():
            for micro_batch in step:
                step.backward(model(**micro_batch.inputs)[1])
    run.close()


@pytest.mark.parametrize("kind", [Summed, SummedBesideAnother])
def test_a_model_whose_loss_is_a_sum_is_refused(kind):
    with pytest.raises(CheckError, match=rf"the loss of {kind.__name__} is a sum over its targets.*'mean'"):
        lw.prepare(kind().double(), rows(), steps=1, **OPTIONS)


def test_a_loss_option_that_is_a_sum_is_refused():
    def loss(output, micro_batch):
        return F.cross_entropy(output[0][0], micro_batch.targets, reduction="sum")

    with pytest.raises(CheckError, match="is a sum over its targets"):
        lw.prepare(Plain().double(), rows(), steps=1, loss=loss, **OPTIONS)


def test_means_sequence_by_sequence_are_taken():
    for kind in (Plain, Weighed):
        lw.prepare(kind().double(), rows(), steps=1, packing="never", **OPTIONS).close()


def masked(micro_batch):
    """Targets of the micro-batch without some, as many as the first token says."""
    first = [int(row[0]) % 4 + 1 for row in micro_batch.sequences]
    numbers = dict(zip(micro_batch.sequence_ids, first))
    targets = micro_batch.targets.clone()
    for sequence, slots, places in micro_batch.own_slots():
        targets[torch.as_tensor(slots[places < numbers[sequence]])] = -100
    return {"idx": micro_batch.tokens[None], "targets": targets[None]}


@pytest.mark.first_cells(1)
@pytest.mark.parametrize("packing", ["always", "never"])
def test_weights_of_made_labels_are_exact_in_packs_and_sequence_by_sequence(packing):
    torch.manual_seed(0)
    model = Plain().double()
    stock = copy.deepcopy(model)
    run = lw.prepare(model, rows(), steps=1, packing=packing, inputs=masked, **OPTIONS)
    step_through(run)
    run.close()
    terms, total = [], 0
    for row in rows():
        tokens = torch.as_tensor(row)[None]
        targets = torch.cat([tokens[:, 1:], torch.full((1, 1), -100)], 1)
        targets[:, : int(row[0]) % 4 + 1] = -100
        count = int((targets != -100).sum())
        total += count
        terms += [stock(tokens, targets)[1] * count] if count else []
    (sum(terms) / total).backward()
    pairs = zip(stock.parameters(), model.parameters())
    assert max(float((p - OPTIONS["lr"] * p.grad - q).detach().abs().max()) for p, q in pairs) < 1e-12


class Masked(Plain):
    """Leaves targets out by a mask beside them."""

    def forward(self, idx, targets, mask):
        logits, mask = super().forward(idx)[0], mask[0].to(self.head.weight.dtype)
        return (F.cross_entropy(logits[0], targets[0], reduction="none") * mask).sum() / mask.sum().clamp(min=1)


class PaddedByZero(Plain):
    """Leaves out targets of a number of its own, which no token of the corpus has."""

    def forward(self, idx, targets):
        return F.cross_entropy(super().forward(idx)[0][0], targets[0], ignore_index=0)


class Classifying(Plain):
    """One class for each sequence."""

    def forward(self, idx, labels):
        return F.cross_entropy(self.head(self.norm(self.run(self.embed(idx), idx))).mean(1), labels)


class Conditioned(Plain):
    """One number for each sequence under a name of labels, which its layers see."""

    def forward(self, idx, y, following):
        embedded = self.embed(idx) + self.embed(y[:, None])
        return F.cross_entropy(self.head(self.norm(self.run(embedded, idx)))[0], following[0], ignore_index=-100)


def with_condition(micro_batch):
    classes = torch.tensor([int(row[0]) for row in micro_batch.sequences])
    return {"idx": micro_batch.tokens[None], "y": classes, "following": micro_batch.targets[None]}


def with_mask(micro_batch):
    targets = micro_batch.targets
    return {
        "idx": micro_batch.tokens[None], "targets": targets.clamp(min=0)[None], "mask": (targets != -100)[None],
    }  # fmt: skip


def with_zeros(micro_batch):
    targets = micro_batch.targets
    return {"idx": micro_batch.tokens[None], "targets": targets.masked_fill(targets == -100, 0)[None]}


def with_classes(micro_batch):
    return {"idx": micro_batch.tokens[None], "labels": torch.tensor([int(row[0]) for row in micro_batch.sequences])}


def next_tokens(row):
    return torch.cat([row[1:], torch.zeros(1, dtype=row.dtype)])[None]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("kind", "inputs", "arguments", "count"),
    [
        (Masked, with_mask, lambda row: (next_tokens(row), torch.arange(len(row))[None] < len(row) - 1), len),
        (PaddedByZero, with_zeros, lambda row: (next_tokens(row),), len),
        (Classifying, with_classes, lambda row: (row[:1],), lambda row: 2),
        (
            Conditioned,
            with_condition,
            lambda row: (row[:1], next_tokens(row).index_fill(1, row.new_tensor([-1]) % len(row), -100)),
            len,
        ),
    ],
    ids=["a mask beside them", "a number of its own", "a class", "a condition"],
)
def test_labels_weigh_as_planned_where_others_say_which_count_and_classes_weigh_one(kind, inputs, arguments, count):
    corpus = [np.maximum(row, 1) for row in rows() if len(row) > 1]
    torch.manual_seed(0)
    model = kind().double()
    stock = copy.deepcopy(model)
    run = lw.prepare(model, corpus, steps=1, inputs=inputs, packing="never", **OPTIONS)
    step_through(run, lambda loss, micro_batch: loss)
    run.close()
    tokens = [torch.as_tensor(row) for row in corpus]
    counts = [count(row) - 1 for row in tokens]
    sum(stock(row[None], *arguments(row)) * n / sum(counts) for row, n in zip(tokens, counts)).backward()
    pairs = zip(stock.parameters(), model.parameters())
    assert max(float((p - OPTIONS["lr"] * p.grad - q).detach().abs().max()) for p, q in pairs) < 1e-12


class Transcribing(Plain):
    """Labels of their own number, fewer than the tokens, which CTC aligns."""

    def forward(self, idx, labels):
        log_probs = self.head(self.norm(self.run(self.embed(idx), idx))).log_softmax(-1).transpose(0, 1)
        sizes = torch.tensor([len(log_probs)]), torch.tensor([labels.shape[1]])
        return {"loss": F.ctc_loss(log_probs, labels, *sizes, zero_infinity=True)}


def transcripts(micro_batch):
    labels = torch.cat([_transcript(row) for row in micro_batch.sequences], 1)
    return {"idx": micro_batch.tokens[None], "labels": labels}


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("loss", [None, lambda output, micro_batch: output["loss"]], ids=["its own", "loss="])
def test_labels_of_their_own_number_need_a_word_of_what_their_loss_is_a_mean_over(loss):
    options = {"steps": 1, "inputs": transcripts, "loss": loss, "objective": "every-token", **OPTIONS}
    torch.manual_seed(0)
    model = Transcribing().double()
    stock = copy.deepcopy(model)
    run = lw.prepare(model, rows(), **options)
    with pytest.raises(CheckError, match=r"labels that have \d+ targets, and .* has \d+,.*mean_over='units'"):
        for step in run.steps():
            for micro_batch in step:
                step.backward(model(**micro_batch.inputs)["loss"])
    run.close()
    run = lw.prepare(model, rows(), **options)
    for step in run.steps():
        for micro_batch in step:
            step.backward(model(**micro_batch.inputs)["loss"], mean_over="units")
        loss = step.update().loss
    run.close()
    with torch.no_grad():
        of_each = [stock(torch.as_tensor(row)[None], _transcript(row))["loss"] for row in rows()]
    assert loss == pytest.approx(float(sum(of_each)) / len(of_each), rel=1e-12)


def _transcript(row):
    return (torch.as_tensor(np.asarray(row))[:: 2 + int(row[0]) % 3] % (VOCAB - 11) + 1)[None]
