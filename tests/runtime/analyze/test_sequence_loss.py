"""The loss of a sequence in a pack is that of the sequence alone."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from lengthwise.core.batch import Pack
from lengthwise.core.errors import InputError
from lengthwise.core.run_folder import RunFolder
from lengthwise.index.build import build_index
from lengthwise.index.sequence_metrics import open_metric
from lengthwise.index.settings import IndexSettings
from lengthwise.index.store import open_index
from lengthwise.runtime.analyze import sequence_loss as loss
from lengthwise.runtime.analyze.sequence_loss import LossScorer
from lengthwise.runtime.models.hf_folder import save_pretrained
from lengthwise.runtime.models.registry import build_model
from lengthwise.runtime.models.targets import IGNORE
from lengthwise.runtime.state import checkpoint
from lengthwise.runtime.train.micro_batch_tensors import feed, masking_of
from tests.runtime.analyze.corpora import analyze_here, error_here, make_index, request_of, some_lengths
from tests.runtime.models.cases import model_of, tiny, tiny_bert, tiny_gpt
from tests.runtime.train.runs import local_world, new_state
from tests.sim.random_plans import SPEC

# float64 sums over a few dozen terms of order one, in another order
EXACT = 1e-10
# float32 logits of order ten, bfloat16 ones with 8 bits
CLOSE = {"float32": 1e-4, "bfloat16": 0.1}
LENGTHS = some_lengths(40)
SPECS = {
    "llama": tiny(),
    "qwen2 tied": tiny(qkv_bias=True, tied_embeddings=True),
    "gpt2": tiny_gpt(),
    "bert": tiny_bert(mask_token_id=7),
}


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return make_index(tmp_path_factory.mktemp("corpus"), LENGTHS)


@pytest.fixture(params=SPECS)
def model(request):
    return model_of(SPECS[request.param])


def alone(model, store, *, max_length=None):
    """Of every sequence, from the logits of that sequence and nothing else."""
    found = []
    for id in range(len(store)):
        source = Cut(store, max_length)
        length = len(source.tokens(id))
        pack = Pack(ids=(id,), lengths=(length,))
        fed = feed(source, pack, torch.device("cpu"), masking=masking_of(model.spec, seed=0))
        has_target = fed.targets_T != IGNORE
        logits = model.logits(fed.tokens_T, pack.cu_seqlens)[has_target]
        found.append(F.cross_entropy(logits, fed.targets_T[has_target]).item() if has_target.any() else 0.0)
    return np.array(found)


class Cut:
    def __init__(self, store, max_length):
        self.store, self.max_length = store, max_length

    def tokens(self, id):
        return self.store.tokens(id)[: self.max_length]


@pytest.mark.first_cells(1)
def test_the_loss_in_packs_on_any_number_of_ranks_is_that_of_each_sequence_alone(ranks, store, model, tmp_path):
    save_pretrained(model, tmp_path / "model")
    expected = alone(model, store)
    assert expected.std() > 0.1
    found = []
    for num_ranks in (1, 2):
        request = request_of(
            f"loss={tmp_path / 'model'}", name=f"loss_{num_ranks}", dtype="float64", max_tokens=100
        )  # several packs, also in one block
        ranks(num_ranks).run(analyze_here, store.path, request, restart=True)
        found.append(open_metric(store.path, request.name, digest=store.digest))
    for one in found:
        assert one.values.dtype == np.float64
        np.testing.assert_allclose(one.values, expected, rtol=0, atol=EXACT)
        assert np.array_equal(one.order, np.argsort(one.values, kind="stable"))
    assert found[0].digest == found[1].digest
    assert found[0].info["objective"] == model.spec.objective


def test_packs_of_all_sizes_give_the_same_losses(store, tmp_path, monkeypatch):
    model = model_of(tiny())
    save_pretrained(model, tmp_path / "model")
    expected = alone(model, store)
    monkeypatch.setattr(loss, "chunk_tokens", lambda vocab_size, device: 7)
    for max_tokens in (1, 30, 10_000):
        request = request_of(f"loss={tmp_path / 'model'}", dtype="float64", max_tokens=max_tokens)
        scorer = LossScorer(request, store)
        scorer.start(torch.device("cpu"))
        ids = np.arange(len(store))
        packs = scorer._packs(ids)
        assert [id for pack in packs for id in pack.ids] == ids.tolist()
        assert all(pack.num_tokens <= max_tokens or len(pack.ids) == 1 for pack in packs)
        assert len(packs) == (1 if max_tokens == 10_000 else len(packs)) and (max_tokens > 1 or len(packs) == len(ids))
        np.testing.assert_allclose(scorer.score(ids), expected, rtol=0, atol=EXACT)


@pytest.mark.parametrize("dtype", CLOSE)
def test_losses_of_narrow_models_are_float32(store, tmp_path, dtype):
    model = model_of(tiny())
    save_pretrained(model, tmp_path / "model")
    scorer = LossScorer(request_of(f"loss={tmp_path / 'model'}", dtype=dtype), store)
    scorer.start(torch.device("cpu"))
    values = scorer.score(np.arange(len(store)))
    assert values.dtype == np.float32
    np.testing.assert_allclose(values, alone(model, store), rtol=CLOSE[dtype], atol=CLOSE[dtype])


def test_the_longest_sequences_come_first(store, tmp_path):
    save_pretrained(model_of(tiny()), tmp_path / "model")
    ids = LossScorer(request_of(f"loss={tmp_path / 'model'}"), store).blocks().ids
    assert [LENGTHS[id] for id in ids] == sorted(LENGTHS, reverse=True)


def test_truncated_sequences_are_scored_on_their_first_tokens(store, tmp_path):
    model = model_of(tiny_gpt(max_positions=16))
    save_pretrained(model, tmp_path / "model")
    request = request_of(f"loss={tmp_path / 'model'}", dtype="float64", max_length=16, truncate=True)
    scorer = LossScorer(request, store)
    scorer.start(torch.device("cpu"))
    expected = alone(model, store, max_length=16)
    np.testing.assert_allclose(scorer.score(np.arange(len(store))), expected, rtol=0, atol=EXACT)


def test_what_cannot_be_scored_is_refused_on_all_ranks(ranks, store, tmp_path):
    for name, spec in {
        "llama": tiny(),
        "short": tiny_gpt(max_positions=16),
        "small": tiny(vocab_size=60),
        "unmasked": tiny_bert(),
    }.items():
        save_pretrained(model_of(spec), tmp_path / name)
    sick = model_of(tiny())
    with torch.no_grad():
        sick.embedding[11] = float("nan")
    save_pretrained(sick, tmp_path / "sick")
    (tmp_path / "empty").mkdir()
    (tmp_path / "llama without weights").mkdir()
    (tmp_path / "llama without weights" / "config.json").write_text((tmp_path / "llama" / "config.json").read_text())
    longest = int(np.argmax(LENGTHS))
    cases = {
        ("empty",): "it has neither the config.json of a Hugging Face folder nor the config.yaml of a run",
        ("llama without weights",): "holds neither model.safetensors nor",
        ("small",): "has 61 token ids, model small embeds 60",
        ("unmasked",): "has no mask_token_id",
        ("sick",): "under {folder} is nan; compute in a wider --dtype",
        ("short",): f"sequence {longest} has {max(LENGTHS)} tokens, model short has positions for 16; score the first "
        "tokens of what is longer with --max-length 16 --truncate",
        ("llama", 30): f"sequence {longest} has {max(LENGTHS)} tokens, over --max-length 30; in all, ",
    }
    requests = [
        request_of(f"loss={tmp_path / folder}", name=f"m{number}", max_length=limit[0] if limit else None)
        for number, (folder, *limit) in enumerate(cases)
    ]
    for errors in ranks(2).run(error_here, store.path, *requests):
        for (message, exit_code), request, said in zip(errors, requests, cases.values(), strict=True):
            assert said.format(folder=request.target) in message and exit_code == 2


def test_an_index_of_bare_lengths_has_no_loss(ranks, store, tmp_path):
    from lengthwise.index.build import build_index
    from lengthwise.index.settings import IndexSettings

    np.save(tmp_path / "lengths.npy", np.array(LENGTHS))
    build_index(IndexSettings(source=tmp_path / "lengths.npy"), tmp_path / "bare", workers=1)
    save_pretrained(model_of(tiny()), tmp_path / "model")
    requests = [request_of(f"loss={tmp_path / 'model'}"), request_of("math:sqrt"), request_of("length")]
    (loss_told, _), (function_told, _), length_told = ranks(1).run(error_here, tmp_path / "bare", *requests)[0]
    assert "holds lengths alone; the loss of a model needs an index with tokens" in loss_told
    assert "holds lengths alone; math:sqrt needs an index with tokens" in function_told
    assert length_told == ("", 0)
    store = open_index(tmp_path / "bare")
    assert open_metric(store.path, "length", digest=store.digest).values.tolist() == LENGTHS


def test_a_pack_that_does_not_fit_into_memory_is_named(store, tmp_path, monkeypatch):
    save_pretrained(model_of(tiny()), tmp_path / "model")
    scorer = LossScorer(request_of(f"loss={tmp_path / 'model'}", max_tokens=100), store)
    scorer.start(torch.device("cpu"))

    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(loss, "mean_losses", full)
    ids = scorer.blocks().ids
    said = (
        rf"sequence {ids[0]} is its longest, {max(LENGTHS)} tokens\) does not fit into the memory of cpu; lower --max-t"
    )
    with pytest.raises(ValueError, match=said):
        scorer.score(ids)
    with pytest.raises(ValueError, match="lower --max-length with --truncate"):
        scorer.score(ids[:1])


def test_the_models_digest_tells_weights_apart(store, tmp_path):
    scorers = []
    for seed in (0, 0, 1):
        folder = tmp_path / f"model{len(scorers)}"
        save_pretrained(model_of(tiny(), seed=seed), folder)
        scorers.append(LossScorer(request_of(f"loss={folder}"), store))
    first, same, other = (scorer.identity()["model_digest"] for scorer in scorers)
    assert first == same != other


def save_run(path: Path, spec) -> None:
    """What a run of one step leaves behind."""
    run = RunFolder(path)
    run.path.mkdir()
    run.config.touch()
    run.write_json("model.json", asdict(spec))
    _, state = new_state(local_world(), torch.float64, spec=spec)
    checkpoint.save(run.checkpoints, state, {"step": 1}, keep=1)


def test_the_latest_checkpoint_of_a_run_scores_as_the_model_it_holds(ranks, store, tmp_path):
    spec = replace(SPEC, vocab_size=61)
    ranks(1).run(save_run, tmp_path / "run", spec)
    scorer = LossScorer(request_of(f"loss={tmp_path / 'run'}", dtype="float64"), store)
    scorer.start(torch.device("cpu"))
    expected = alone(build_model(spec, dtype=torch.float64, seed=1), store)
    np.testing.assert_allclose(scorer.score(np.arange(len(store))), expected, rtol=0, atol=EXACT)
    before = scorer.identity()["model_digest"]
    ranks(1).run(save_run, tmp_path / "other", replace(spec, num_layers=2))
    assert LossScorer(request_of(f"loss={tmp_path / 'other'}"), store).identity()["model_digest"] != before


def test_a_run_without_a_checkpoint_has_no_loss(store, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").touch()
    with pytest.raises(InputError, match="checkpoint"):
        LossScorer(request_of(f"loss={tmp_path / 'run'}"), store)


def test_the_loss_of_an_index_with_labels_is_that_of_its_labels(tmp_path):
    numbers = np.random.default_rng(0)
    rows = [numbers.integers(0, 50, size).tolist() for size in (5, 17, 9)]
    labels = [[token if k % 3 == 2 else IGNORE for k, token in enumerate(row)] for row in rows]
    lines = (json.dumps({"input_ids": row, "labels": label}) for row, label in zip(rows, labels))
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    build_index(IndexSettings(source=tmp_path / "rows.jsonl"), tmp_path / "index", workers=1)
    model = model_of(SPECS["llama"])
    save_pretrained(model, tmp_path / "model")
    expected = []
    for row, label in zip(rows, labels):
        logits = model.logits(torch.tensor(row), (0, len(row)))[:-1]
        expected.append(F.cross_entropy(logits, torch.tensor(label[1:]), ignore_index=IGNORE).item())
    request = request_of(f"loss={tmp_path / 'model'}", dtype="float64", max_tokens=100)
    scorer = LossScorer(request, open_index(tmp_path / "index"))
    scorer.start(torch.device("cpu"))
    np.testing.assert_allclose(scorer.score(np.arange(3)), expected, rtol=EXACT)
