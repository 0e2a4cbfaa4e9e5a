"""The configured order: by a metric that is saved beside every index, over a mixture, within a budget."""

import json

import numpy as np
import pytest

from lengthwise.config.run_config import check
from lengthwise.core.errors import InputError
from lengthwise.data.corpus import open_corpus
from lengthwise.index.sequence_metrics import METRIC_VERSION, values_digest
from lengthwise.index.store import open_index
from lengthwise.session.planning import make_sampler
from lengthwise.session.sampling_report import sampling_report, training_warnings, unused_settings


@pytest.fixture
def indexes(cli, tmp_path):
    """Two indexes of lengths with a metric: what is long is easy."""
    paths = []
    for name, lengths in (("a", [5, 40, 7]), ("b", [9, 3, 20, 30])):
        np.save(tmp_path / f"{name}.npy", np.array(lengths))
        assert cli("index", tmp_path / f"{name}.npy", "--out", tmp_path / name)[0] == 0
        paths.append(tmp_path / name)
        values = -np.array(lengths, dtype=np.float64)
        save_metric(tmp_path / name, values)
    return paths


def save_metric(index, values):
    folder = index / "metrics"
    folder.mkdir()
    np.save(folder / "loss.npy", values)
    digest = open_index(index).digest
    info = {"schema_version": METRIC_VERSION, "index_digest": digest, "num_sequences": len(values)}
    info |= {"files": {"loss.npy": (folder / "loss.npy").stat().st_size}}
    info |= {"digest": values_digest(values, index_digest=digest)}
    (folder / "loss.json").write_text(json.dumps(info))


def sample(data):
    config = check({"data": data})
    corpus = open_corpus(config.data)
    return config, corpus, make_sampler(config, corpus)


def test_sequences_of_a_mixture_and_pieces_of_them_come_by_the_metric_of_their_parts(indexes):
    data = {"mixture": [{"index": str(path)} for path in indexes], "order": "sorted", "metric": "loss"}
    _, corpus, sampler = sample({**data, "max_length": 20, "over_length": "split", "sequences_per_step": 100})
    batch = next(sampler)
    wholes = np.concatenate([part.store.lengths.lengths[part.view.base_ids] for part in corpus.parts])
    assert wholes[list(batch.ids)].tolist() == [40, 40, 30, 30, 20, 9, 7, 5, 3]
    save = sampler.state_dict()
    assert make_sampler(check({"data": {**data, "max_length": 20, "over_length": "split", "sequences_per_step": 100}}),
                        corpus).state_dict()["order"] == save["order"]  # fmt: skip


def test_the_report_on_a_run_is_of_length_and_of_its_metric(indexes):
    config, corpus, _ = sample({"index": str(indexes[1]), "order": "sorted", "metric": "loss", "sequences_per_step": 1})
    report = sampling_report(config, corpus)
    assert [(trend.name, round(trend.spearman, 6)) for trend in report.trends] == [("length", -1.0), ("loss", 1.0)]


def test_settings_that_others_make_meaningless_are_named():
    data, optim = {"metric": "loss", "pacing": "step", "window": 64}, {"lr_reference": 8, "lr_scaling_by": "sequences"}

    def unused(order, scaling):
        tree = {"data": {**data, "order": order}, "optim": {**optim, "lr_scaling": scaling}}
        return [words.partition(" is not used: ")[::2] for words in unused_settings(check(tree))]

    why = "data.order is shuffled"
    assert unused("shuffled", "sqrt") == [(f"data.{word}", why) for word in ("metric=loss", "pacing=step", "window=64")]
    assert [name for name, _ in unused("curriculum", "sqrt")] == ["data.window=64"]
    assert [name for name, _ in unused("windowed", "sqrt")] == ["data.pacing=step"]
    why = "optim.lr_scaling is none"
    assert unused("sorted", "none")[2:] == [
        ("optim.lr_scaling_by=sequences", why), ("optim.lr_reference=8.0", why),
    ]  # fmt: skip
    assert unused_settings(check({})) == []


def test_a_step_counts_its_padding_where_that_is_asked_for(indexes):
    data = {"index": str(indexes[1]), "order": "sorted", "tokens_per_step": 60}
    plain, padded = (sample({**data, "count_padding": count})[2] for count in (False, True))
    assert [next(plain).lengths for _ in range(2)] == [(3, 9, 20), (30,)]
    assert [next(padded).lengths for _ in range(2)] == [(3, 9, 20), (30,)]
    plain, padded = (sample({**data, "tokens_per_step": 32, "count_padding": count})[2] for count in (False, True))
    assert [next(plain).lengths for _ in range(2)] == [(3, 9, 20), (30,)]
    assert [next(padded).lengths for _ in range(3)] == [(3, 9), (20,), (30,)]


def test_metrics_that_are_not_there_and_budgets_that_contradict_are_refused(indexes):
    with pytest.raises(InputError, match="no metric 'noise'"):
        sample({"index": str(indexes[0]), "order": "sorted", "metric": "noise"})
    with pytest.raises(InputError, match=r"leave data\.sequences_per_step out"):
        sample({"index": str(indexes[0]), "sequences_per_step": 2, "count_padding": True})


def test_a_run_that_leaves_sequences_out_or_never_ends_its_warm_up_says_so(indexes):
    data = {"index": str(indexes[1]), "max_length": 10, "over_length": "drop"}
    config = check({"data": data, "train": {"steps": 20}, "optim": {"warmup_steps": 20}})
    corpus = open_corpus(config.data)
    assert list(training_warnings(config, corpus)) == [
        "2 sequences (50 tokens) over 10 left out, of 4 with 62 tokens (data.over_length)",
        "optim.warmup_steps is 20 and the run has 20 steps, so it never reaches optim.lr",
    ]
    config = check({"data": data | {"over_length": "split"}, "train": {"steps": 20}, "optim": {"warmup_steps": 19}})
    assert list(training_warnings(config, open_corpus(config.data))) == []


def test_a_validation_set_of_a_few_sequences_is_remarked(indexes):
    config = check({"data": {"index": str(indexes[1]), "validation_share": 0.01}})
    (words,) = training_warnings(config, open_corpus(config.data))
    assert words.startswith("data.validation_share=0.01 holds out 1 of 4 sequences")
