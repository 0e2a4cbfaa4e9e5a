"""Reading and writing what ``lengthwise analyze`` saves beside an index."""

import json

import numpy as np
import pytest

from lengthwise.core.errors import InputError
from lengthwise.index.sequence_metrics import MetricFiles, finish, metric_names, open_metric, save_array

DIGEST = "0123456789abcdef"
LENGTHS = np.array([5, 3, 9, 3, 7])


def save(index, name="loss", values=(0.5, 0.25, 2.0, 0.25, 1.0), *, dtype="<f8", order=True):
    files = MetricFiles(index=index, name=name)
    files.folder.mkdir(exist_ok=True)
    values = np.array(values, dtype=dtype)
    save_array(files.values, values)
    if order:
        save_array(files.order, np.argsort(values, kind="stable").astype("<i8"))
    finish(files, index_digest=DIGEST, lengths=LENGTHS[: len(values)], details={"metric": "test", "seconds": 1.5})
    return files


@pytest.mark.parametrize("dtype", ["<i8", "<f4", "<f8"])
def test_a_metric_is_read_as_it_was_written(tmp_path, dtype):
    save(tmp_path, values=[3, 1, 4, 1, 5], dtype=dtype)
    metric = open_metric(tmp_path, "loss", digest=DIGEST)
    assert metric.values.tolist() == [3, 1, 4, 1, 5] and metric.values.dtype == np.dtype(dtype)
    assert metric.order is not None and metric.order.tolist() == [1, 3, 0, 2, 4]
    assert (metric.name, len(metric), metric.info["metric"], metric.info["seconds"]) == ("loss", 5, "test", 1.5)
    assert not metric.values.flags.writeable and not metric.order.flags.writeable
    assert [path.name for path in tmp_path.rglob("*.partial*")] == []


def test_the_order_may_be_missing(tmp_path):
    save(tmp_path, order=False)
    assert open_metric(tmp_path, "loss", digest=DIGEST).order is None


def test_the_digest_tells_values_types_and_indexes_apart(tmp_path):
    digests = []
    for number, (values, dtype) in enumerate([([1, 2], "<i8"), ([1, 3], "<i8"), ([1, 2], "<f8")]):
        save(tmp_path, f"m{number}", values, dtype=dtype)
        digests.append(open_metric(tmp_path, f"m{number}", digest=DIGEST).digest)
    assert len(set(digests)) == 3
    save(tmp_path, "again", [1, 2], dtype="<i8")
    assert open_metric(tmp_path, "again", digest=DIGEST).digest == digests[0]


def test_the_summary_is_that_of_the_values(tmp_path):
    save(tmp_path)
    info = open_metric(tmp_path, "loss", digest=DIGEST).info
    assert (info["min"], info["mean"], info["max"]) == (0.25, 0.8, 2.0)
    assert info["quantiles"]["p50"] == 0.5
    assert info["correlation_with_length"]["spearman"] == pytest.approx(1, abs=1e-15)
    assert 0.9 < info["correlation_with_length"]["pearson"] < 1


def test_a_metric_that_does_not_vary_has_no_correlation(tmp_path):
    save(tmp_path, values=[2.0] * 5)
    info = open_metric(tmp_path, "loss", digest=DIGEST).info
    assert info["correlation_with_length"] == {"pearson": None, "spearman": None}


def test_metrics_of_an_index_are_listed(tmp_path):
    assert metric_names(tmp_path) == []
    save(tmp_path, "loss")
    save(tmp_path, "entropy")
    assert metric_names(tmp_path) == ["entropy", "loss"]


def test_a_missing_metric_is_refused_with_those_there_are_and_the_way_to_make_one(tmp_path):
    with pytest.raises(InputError, match=r"no metric 'loss' beside .*; there is none yet; make one with: lengthwise"):
        open_metric(tmp_path, "loss", digest=DIGEST)
    save(tmp_path, "entropy")
    save(tmp_path, "loss2")
    with pytest.raises(InputError, match=r"the metrics there are entropy, loss2; .* --name loss$"):
        open_metric(tmp_path, "loss", digest=DIGEST)


def test_a_half_made_metric_is_no_metric(tmp_path):
    files = save(tmp_path)
    files.info.unlink()
    files.parts.mkdir()
    with pytest.raises(InputError, match="is not finished; run the same `lengthwise analyze` command again"):
        open_metric(tmp_path, "loss", digest=DIGEST)


def test_a_metric_of_another_index_is_refused(tmp_path):
    save(tmp_path)
    with pytest.raises(InputError, match=rf"of another index \(digest {DIGEST}, this one has 00ff\)"):
        open_metric(tmp_path, "loss", digest="00ff")


@pytest.mark.parametrize("name", ["", "a/b", "..", "x.order", "a b", "-x"])
def test_a_name_that_could_be_a_path_or_another_file_is_refused(tmp_path, name):
    with pytest.raises(InputError, match="cannot name a metric"):
        open_metric(tmp_path, name, digest=DIGEST)


def flip(path, offset):
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def test_damage_is_told(tmp_path):
    def opened_after(harm):
        files = save(tmp_path)
        harm(files)
        with pytest.raises(InputError) as caught:
            open_metric(tmp_path, "loss", digest=DIGEST)
        assert "--restart" in str(caught.value)
        return str(caught.value)

    size = save(tmp_path).values.stat().st_size
    assert "loss.npy is missing" in opened_after(lambda files: files.values.unlink())
    assert f"has {size - 1:,} bytes, not {size:,}" in opened_after(
        lambda files: files.values.write_bytes(files.values.read_bytes()[:-1])
    )
    assert "the values in loss.npy are not" in opened_after(lambda files: flip(files.values, -1))
    assert "the ids in loss.order.npy are not" in opened_after(lambda files: flip(files.order, -1))
    assert "loss.npy is no array" in opened_after(lambda files: flip(files.values, 0))
    assert "is not that of a metric" in opened_after(lambda files: files.info.write_text("{"))

    def other_version(files):
        files.info.write_text(json.dumps({**json.loads(files.info.read_text()), "schema_version": 99}))

    assert "schema version 99" in opened_after(other_version)


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("schema_version", (None, "1", 99, [])),
        ("index_digest", (None, 7, "x" * 5000)),
        ("digest", (None, 7, "0" * 16)),
        ("order_digest", (None, [], "0" * 16)),
        ("num_sequences", (None, "5", 4, 5.0, 10**30)),
        ("files", (None, [], {}, {"../../etc/passwd": 7}, {"loss.npy": "7"}, {"loss.npy": -1})),
    ],
)
def test_a_description_that_was_tampered_with_is_refused(tmp_path, key, values):
    for value in values:
        files = save(tmp_path)
        files.info.write_text(json.dumps({**json.loads(files.info.read_text()), key: value}))
        with pytest.raises(InputError, match="analyze again"):
            open_metric(tmp_path, "loss", digest=DIGEST)


@pytest.mark.parametrize("text", ["", "[1]", "{", '{"a":' * 50_000, '{"schema_version": ' + "9" * 5000 + "}", "\0"])
def test_what_is_no_description_is_refused(tmp_path, text):
    files = save(tmp_path)
    files.info.write_text(text)
    with pytest.raises(InputError, match=r"loss\.json"):
        open_metric(tmp_path, "loss", digest=DIGEST)


def test_values_that_are_not_finite_are_refused(tmp_path):
    save(tmp_path, values=[1.0, np.nan, 2.0, np.inf, 3.0])
    with pytest.raises(InputError, match=r"not finite|NaN"):
        open_metric(tmp_path, "loss", digest=DIGEST)
