"""A metric is the same for any number of ranks and however often its analysis was killed."""

import socket
import subprocess

import numpy as np
import pytest

from lengthwise.core.errors import CommunicationError, InputError
from lengthwise.index.sequence_metrics import MetricFiles, open_metric
from lengthwise.runtime.analyze.blocks import FEWEST_BLOCKS, MOST_BLOCKS, FinishedBlocks, cut_blocks
from lengthwise.runtime.analyze.request import AnalysisRequest, parse_metric
from lengthwise.runtime.analyze.work_queue import WorkQueue
from tests.runtime.analyze.corpora import (
    BROKEN_ID,
    analyze_here,
    error_here,
    make_index,
    request_of,
    some_lengths,
    users_module,
)
from tests.runtime.train.runs import local_world

LENGTHS = some_lengths(60)


@pytest.fixture
def store(tmp_path):
    return make_index(tmp_path, LENGTHS)


def opened(store, name):
    return open_metric(store.path, name, digest=store.digest)


def names_of(store):
    return sorted(path.name for path in (store.path / "metrics").iterdir())


@pytest.mark.first_cells(1)
@pytest.mark.parametrize(
    ("function", "dtype", "expected"),
    [
        ("mean_token", "float64", lambda tokens, id: float(tokens.mean() // 8)),
        ("num_distinct", "int64", lambda tokens, id: len(set(tokens.tolist()))),
        ("narrow", "float32", lambda tokens, id: np.float32(id / 3)),
        ("mixed", "float64", lambda tokens, id: id if id % 2 else id / 4),
    ],
)
def test_a_metric_holds_what_the_function_says_of_each_sequence_for_any_number_of_ranks(
    ranks, store, tmp_path, function, dtype, expected
):
    metric = f"{users_module(tmp_path)}:{function}"
    found = []
    for num_ranks in (1, 2):
        outcomes = ranks(num_ranks).run(analyze_here, store.path, request_of(metric, name=f"on_{num_ranks}"))
        assert len({made.info["digest"] for made, _ in outcomes}) == 1
        found.append(opened(store, f"on_{num_ranks}"))
    for one in found:
        assert one.values.tolist() == [expected(store.tokens(id), id) for id in range(len(store))]
        assert one.values.dtype == dtype
        assert np.array_equal(one.order, np.argsort(one.values, kind="stable"))
    assert found[0].digest == found[1].digest


def test_lengths_are_a_metric_like_any_other(ranks, store):
    ranks(2).run(analyze_here, store.path, request_of("length"))
    length = opened(store, "length")
    assert length.values.tolist() == LENGTHS
    assert length.info["correlation_with_length"]["spearman"] == pytest.approx(1)
    assert names_of(store) == ["length.json", "length.npy", "length.order.npy"]


def test_progress_of_all_ranks_is_shown_by_the_first_and_ends_with_everything(ranks, store):
    (_, shown), (_, hidden) = ranks(2).run(analyze_here, store.path, request_of("length"))
    assert shown == sorted(shown) and shown[-1] == (len(LENGTHS), sum(LENGTHS), sum(LENGTHS)) and not hidden


def test_a_finished_metric_is_left_as_it_is_unless_restarted(ranks, store, tmp_path):
    request = request_of(f"{users_module(tmp_path)}:mixed")
    (first, _), _ = ranks(2).run(analyze_here, store.path, request)
    time = MetricFiles(index=store.path, name="mixed").values.stat().st_mtime_ns
    (again, _), _ = ranks(2).run(analyze_here, store.path, request)
    assert not first.was_up_to_date and again.was_up_to_date and again.info == first.info
    assert MetricFiles(index=store.path, name="mixed").values.stat().st_mtime_ns == time
    (anew, _), _ = ranks(2).run(analyze_here, store.path, request, restart=True)
    assert not anew.was_up_to_date and anew.info["digest"] == first.info["digest"]


def test_an_analysis_whose_rank_is_killed_goes_on_with_another_number_of_ranks(ranks, store, tmp_path):
    flag, module = tmp_path / "flag", users_module(tmp_path)
    flag.touch()
    request = request_of(f"{module}:kills")
    with pytest.raises(AssertionError, match="the process died"):
        ranks(1).run(analyze_here, store.path, request)
    with pytest.raises(InputError, match="is not finished; run the same"):
        opened(store, "kills")
    flag.unlink()
    made = ranks(2).run(analyze_here, store.path, request)[0][0]
    assert made.num_resumed_blocks == BROKEN_ID  # of one sequence each, in corpus order
    assert opened(store, "kills").values.tolist() == [float(id) for id in range(len(store))]
    assert names_of(store) == ["kills.json", "kills.npy", "kills.order.npy"]


def test_an_error_of_one_rank_is_that_of_all_and_finished_blocks_are_kept(ranks, store, tmp_path):
    flag, module = tmp_path / "flag", users_module(tmp_path)
    flag.touch()
    request = request_of(f"{module}:fails")
    told = [errors[0] for errors in ranks(2).run(error_here, store.path, request)]
    assert told[0] == told[1] and told[0][1] == 2
    assert (
        f"{module}:fails fails on sequence {BROKEN_ID} ({LENGTHS[BROKEN_ID]} tokens): OSError: the disk" in told[0][0]
    )
    assert f"{module}.py, line " in told[0][0]
    flag.unlink()
    (made, _), _ = ranks(2).run(analyze_here, store.path, request)
    assert BROKEN_ID <= made.num_resumed_blocks < len(store)
    assert opened(store, "fails").values.tolist() == [float(id) for id in range(len(store))]


@pytest.mark.parametrize("call", ["sys.exit", "os._exit"])
def test_a_function_that_exits_is_an_error_on_all_ranks_and_finished_blocks_are_kept(ranks, store, tmp_path, call):
    flag, module = tmp_path / "flag", users_module(tmp_path)
    flag.write_text(call)
    for errors in ranks(2).run(error_here, store.path, request_of(f"{module}:exits")):
        assert f"{module}:exits fails on sequence {BROKEN_ID} ({LENGTHS[BROKEN_ID]} tokens): SystemExit" in errors[0][0]
    flag.unlink()
    (made, _), _ = ranks(2).run(analyze_here, store.path, request_of(f"{module}:exits"))
    assert BROKEN_ID <= made.num_resumed_blocks < len(store)


def test_ranks_do_not_wait_for_one_that_is_gone_or_scores_nothing_any_more(ranks):
    told, _ = ranks(2).run(_wait_in_vain)
    assert told[0].startswith("rank 1 left before all sequences were scored; finished blocks are kept")
    assert told[1].startswith("no rank has scored a sequence for 0.2 s; finished blocks are kept")


def _wait_in_vain():
    ended = subprocess.Popen(["true"])
    ended.wait()
    told = []
    for is_gone, timeout_s in ((True, 60.0), (False, 0.2)):
        deal = WorkQueue(local_world())
        if local_world().is_first:
            deal._timeout_s = timeout_s
            deal._processes = [deal._processes[0], (socket.gethostname(), ended.pid) if is_gone else deal._processes[1]]
            with pytest.raises(CommunicationError) as error:
                deal.wait(lambda: None)
            told.append(str(error.value))
    return told


def test_what_is_no_finite_number_is_refused_with_the_sequence(ranks, store, tmp_path):
    request = request_of(f"{users_module(tmp_path)}:gives")
    for given, said in {
        "nan": "returns nan for sequence 0; a metric must be a finite number",
        "inf": "returns inf for sequence 0; a metric must be a finite number",
        "none": "returns None for sequence 0; it must return one number",
        "array": r"returns an array of shape (2,) for sequence 0; it must return one number",
        "text": "returns '1' for sequence 0; it must return one number",
        "huge": f"returns {2**63} for sequence 0, beyond 64 bits",
    }.items():
        (tmp_path / "flag").write_text(given)
        message, exit_code = ranks(1).run(error_here, store.path, request)[0][0]
        assert said in message and exit_code == 2


def test_a_function_that_cannot_be_called_is_refused_on_all_ranks(ranks, store, tmp_path):
    module = users_module(tmp_path)
    (tmp_path / "broken_module.py").write_text("import nothing_of_this_name\n")
    cases = {
        "no_module_like_this:f": "no module 'no_module_like_this' in",
        "broken_module:f": "importing broken_module fails: No module named 'nothing_of_this_name'",
        f"{module}:mean_tokens": "has no 'mean_tokens'; did you mean mean_token?",
        f"{module}:NOT_A_FUNCTION": "it is a int, not a function",
        f"{module}:writes": "read-only",
    }
    requests = [request_of(metric) for metric in cases]
    for errors in ranks(2).run(error_here, store.path, *requests):
        for (message, exit_code), said in zip(errors, cases.values(), strict=True):
            assert said in message and exit_code == 2


def test_blocks_of_another_request_are_not_mixed_in(ranks, store, tmp_path):
    flag, module = tmp_path / "flag", users_module(tmp_path)
    flag.touch()
    ranks(1).run(error_here, store.path, request_of(f"{module}:fails", name="mine"))
    other = request_of(f"{module}:num_distinct", name="mine")
    message, exit_code = ranks(1).run(error_here, store.path, other)[0][0]
    assert "is half-made by another request (function: " in message and "--restart" in message and exit_code == 2
    ranks(1).run(analyze_here, store.path, other, restart=True)
    assert opened(store, "mine").values.tolist() == [len(set(store.tokens(id).tolist())) for id in range(len(store))]
    message, _ = ranks(1).run(error_here, store.path, request_of("length", name="mine"))[0][0]
    assert "is another one (kind: 'function' then, 'length' now)" in message and "--restart" in message


def test_blocks_that_lost_their_request_are_made_again(ranks, store):
    parts = FinishedBlocks(files=MetricFiles(index=store.path, name="length"))
    parts.files.parts.mkdir(parents=True)
    parts.save(0, np.full(1, -7))  # of a metric whose removal was killed half-way
    made, _ = ranks(1).run(analyze_here, store.path, request_of("length"))[0]
    assert made.num_resumed_blocks == 0 and opened(store, "length").values.tolist() == LENGTHS


def test_a_changed_function_is_another_one(ranks, store, tmp_path):
    module = users_module(tmp_path)
    ranks(1).run(analyze_here, store.path, request_of(f"{module}:mixed"))
    with (tmp_path / f"{module}.py").open("a") as file:
        file.write("# changed\n")
    message, _ = ranks(1).run(error_here, store.path, request_of(f"{module}:mixed"))[0][0]
    assert "is another one (source_digest" in message


def test_two_analyses_do_not_write_one_metric_at_once(ranks, store):
    parts = FinishedBlocks(files=MetricFiles(index=store.path, name="length"))
    with parts.held():
        errors = ranks(2).run(error_here, store.path, request_of("length"))
        assert all(
            "is in use by another analysis that makes metric 'length': process " in message
            for ((message, _),) in errors
        )
    assert not parts.files.parts.exists()
    ranks(2).run(analyze_here, store.path, request_of("length"))


def fill_the_disk_after(num_blocks, index, request):
    def save(parts, number, values, plain=FinishedBlocks.save):
        if number >= num_blocks:
            raise OSError(28, "No space left on device")
        plain(parts, number, values)

    plain, FinishedBlocks.save = FinishedBlocks.save, save
    try:
        return error_here(index, request)
    finally:
        FinishedBlocks.save = plain


def test_a_full_disk_keeps_finished_blocks(ranks, store):
    message, exit_code = ranks(1).run(fill_the_disk_after, 7, store.path, request_of("length"))[0][0]
    assert "No space left on device; finished blocks are kept" in message and exit_code == 1
    made, _ = ranks(1).run(analyze_here, store.path, request_of("length"))[0]
    assert made.num_resumed_blocks == 7 and opened(store, "length").values.tolist() == LENGTHS


@pytest.mark.parametrize("count", [1, 5, 300, 10_000, 300_000])
def test_blocks_hold_every_sequence_once_in_order_and_cost_alike(count):
    costs = np.random.default_rng(count).integers(1, 1000, count)
    ids = np.random.default_rng(0).permutation(count)
    blocks = cut_blocks(ids, costs, block_cost=20_000)
    held = [blocks.of(number) for number in range(len(blocks))]
    assert np.array_equal(np.concatenate(held), ids) and all(map(len, held))
    assert len(blocks) <= MOST_BLOCKS + 1 and len(blocks) >= min(count, FEWEST_BLOCKS) // 4
    largest = max(-(-int(costs.sum()) // MOST_BLOCKS), min(20_000, -(-int(costs.sum()) // FEWEST_BLOCKS)))
    ends = np.cumsum(costs)[blocks.cuts[1:] - 1]
    assert np.diff(ends, prepend=0).max() < largest + costs.max()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"kind": "function", "target": "a:b", "name": "length"}, "choose another --name"),
        ({"kind": "function", "target": "a:b", "name": "b", "max_length": 5}, "metric a:b has no model"),
        ({"kind": "length", "name": "length", "truncate": True}, "metric length has no model"),
        ({"kind": "loss", "target": "m", "name": "loss", "truncate": True}, "give that too"),
    ],
)
def test_a_request_that_contradicts_itself_is_refused(settings, said):
    with pytest.raises(InputError, match=said):
        AnalysisRequest(**settings)


@pytest.mark.parametrize("text", ["", "loss", "loss=", "len", "a:", ":b"])
def test_what_is_no_metric_is_refused(text):
    with pytest.raises(InputError, match=r"known are length, loss=FOLDER of a model, and MODULE:FUNCTION"):
        parse_metric(text)


def test_metrics_are_named_after_what_they_are():
    assert parse_metric("length") == ("length", "", "length")
    assert parse_metric("loss=some/folder:x") == ("loss", "some/folder:x", "loss")
    assert parse_metric("pkg.mod:Class.f") == ("function", "pkg.mod:Class.f", "f")
