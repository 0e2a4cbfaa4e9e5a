"""What is compared of a model, its corpus and its options: every value that ranks must share, and no other."""

import sys
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from lengthwise.config.optimizer_settings import OptimizerSettings
from lengthwise.config.prepare_options import read_options
from lengthwise.core.lengths import LengthIndex
from lengthwise.core.version import __version__
from lengthwise.runtime.comm.differences import differences
from lengthwise.session import rank_agreement
from lengthwise.session.datasets import read_sequences
from lengthwise.session.rank_agreement import NUM_PROBES, to_compare


def model_of():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    model[0].bias.requires_grad_(False)
    return model


def index_of(rows):
    """Sequences of an index, as far as they are compared."""
    lengths = LengthIndex(lengths=np.array([len(row) for row in rows]))
    return SimpleNamespace(store=None, lengths=lengths, tokens=lambda number: np.asarray(rows[number]))


ROWS = [[number, number + 1, number + 2][: 1 + number % 3] for number in range(1, 31)]


def tree_of(*, model=None, sequences=None, **options):
    return to_compare(model or model_of(), sequences or index_of(ROWS), read_options(options))


def differing(one, other):
    return [difference.key for difference in differences({0: one, 1: other})]


def test_options_are_compared_but_for_those_that_are_a_rank_s_own():
    base = tree_of()
    names = set(type(read_options({})).model_fields)
    assert base["options"].keys() == names - {"frozen", "profile", "verbose", "timeout_s", "workers"}
    own = tree_of(frozen=[nn.Linear(1, 1)], profile="a.json", verbose=False, timeout_s=9.0, workers=2)
    assert differing(base, own) == []
    assert differing(base, tree_of(seed=1, lr=0.5)) == ["options.lr", "options.seed"]


@dataclass
class Options:
    rates: tuple


def halved(step):
    return 0.5 * step


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (None, None),
        (True, True),
        (0.5, 0.5),
        ("a", "a"),
        ((1, [2, halved]), [1, [2, "halved"]]),
        (Options(rates=(1, halved)), {"type": "Options", "rates": [1, "halved"]}),
        (halved, "halved"),
        (Options, "Options"),
        (partial(halved, 1), ["halved", [1], {}]),
    ],
)
def test_an_option_becomes_plain_values(value, plain):
    given = type("Given", (), {"model_fields": {"value": None}, "policy": "auto"})()
    given.value = value
    assert to_compare(model_of(), index_of(ROWS), given)["options"] == {"value": plain}


def test_arrays_among_options_are_compared_by_content_and_shape():
    def metric(values):
        return tree_of(order="sorted", metric=values, sequences_per_step=2)

    base = metric(np.array([1, 2, 3, 4]))
    assert base["options"]["metric"].startswith("[4] ")
    assert differing(base, metric(np.array([1, 2, 3, 4], dtype=np.int32))) == []
    assert differing(base, metric(torch.tensor([1, 2, 3, 4]))) == []
    for other in (np.array([1, 2, 3, 5]), np.array([[1, 2], [3, 4]]), np.array([1.0, 2, 3, 4])):
        assert differing(base, metric(other)) == ["options.metric"]
    sgd = [tree_of(optimizer=OptimizerSettings(name="sgd", momentum=momentum)) for momentum in (0.5, 0.6)]
    assert differing(*sgd) == ["options.optimizer.momentum"]


def test_versions_are_those_of_what_is_imported(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", SimpleNamespace(__version__="9.9"))
    monkeypatch.delitem(sys.modules, "transformers", raising=False)
    assert tree_of()["versions"] == {
        "lengthwise": __version__, "torch": torch.__version__, "numpy": np.__version__, "peft": "9.9",
        "transformers": None,
    }  # fmt: skip


def change(model, name):
    with torch.no_grad():
        {"weight": model[0].weight, "mean": model[1].running_mean}[name][1] += 1e-3


CHANGES = {
    "parameters.0.weight": lambda model: change(model, "weight"),
    "parameters.0.bias": lambda model: model[0].bias.requires_grad_(True),
    "buffers.1.running_mean": lambda model: change(model, "mean"),
    "training": lambda model: model.eval(),
}


@pytest.mark.parametrize("key", CHANGES)
def test_of_a_model_values_flags_and_mode_are_compared(key):
    model = model_of()
    CHANGES[key](model)
    assert differing(tree_of(), tree_of(model=model)) == [f"model.{key}"]


def test_of_weights_that_are_sharded_elsewhere_shapes_alone_are_compared(monkeypatch):
    tree = tree_of()["model"]
    assert tree["class"] == "Sequential" and tree["parameters"]["0.weight"].startswith(
        "trained, torch.float32 [3, 2], c"
    )
    assert tree["parameters"]["0.bias"].startswith("frozen, ")
    monkeypatch.setattr(rank_agreement, "fsdp_modules", lambda model: [model])
    tree = tree_of()["model"]
    assert tree["parameters"]["0.weight"] == "trained, torch.float32 [3, 2]"
    assert "checksum" in tree["buffers"]["1.running_mean"]


def changed_rows(number):
    rows = [list(row) for row in ROWS]
    rows[number][-1] += 1
    return rows


def test_every_token_of_a_small_corpus_is_compared():
    base = tree_of()
    for number in range(len(ROWS)):
        assert differing(base, tree_of(sequences=index_of(changed_rows(number)))) == ["corpus.content"]
    moved = [*ROWS[:-2], ROWS[-1], ROWS[-2]]
    assert differing(base, tree_of(sequences=index_of(moved))) == ["corpus.content", "corpus.lengths"]
    fewer = {"corpus.content", "corpus.lengths", "corpus.num_sequences", "corpus.num_tokens"}
    assert set(differing(base, tree_of(sequences=index_of(ROWS[:-1])))) == fewer
    ends = [[1, 2], [3, 4, 5]], [[1, 2, 3], [4, 5]]
    assert "corpus.content" in differing(*(tree_of(sequences=index_of(rows)) for rows in ends))


def test_of_a_large_corpus_some_sequences_all_over_it_are_read(monkeypatch):
    rows, numbers = [[1], [2, 2, 2], *([number] * 2 for number in range(998))], []
    sequences = index_of(rows)
    read = sequences.tokens
    sequences.tokens = lambda number: numbers.append(number) or read(number)
    monkeypatch.setattr(rank_agreement, "FULL_BYTES", 1000 * 2 * 8)
    tree_of(sequences=sequences)
    assert sorted(set(numbers)) == list(range(1000))
    numbers.clear()
    monkeypatch.setattr(rank_agreement, "FULL_BYTES", 1000 * 2 * 8 - 1)
    tree_of(sequences=sequences)
    probed = sorted(set(numbers))
    assert len(probed) == NUM_PROBES and (probed[0], probed[-1]) == (0, 999)
    assert max(np.diff(probed)) <= 1000 / (NUM_PROBES - 1) + 1


def test_of_items_all_columns_are_compared():
    def items(label):
        return read_sequences([{"input_ids": [1, 2, 3], "labels": [1, 2, label]}, {"input_ids": [4], "labels": [4]}])

    assert differing(tree_of(sequences=items(3)), tree_of(sequences=items(3))) == []
    assert differing(tree_of(sequences=items(3)), tree_of(sequences=items(-100))) == ["corpus.content"]
