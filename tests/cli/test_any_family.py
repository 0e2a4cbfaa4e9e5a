"""`lengthwise train` with a family that only transformers has: trained, resumed, validated, exported as an own one."""

import json
import shutil
from itertools import islice

import pytest
import torch

from lengthwise.cli.worker import find_cluster
from lengthwise.config.run_config import load
from lengthwise.core.errors import InputError
from lengthwise.core.run_folder import RunFolder
from lengthwise.data.corpus import open_corpus, open_validation
from lengthwise.models.stock_model import read_stock_model
from lengthwise.runtime.comm.world import DistContext
from lengthwise.runtime.state.checkpoint import latest, load_weights
from lengthwise.runtime.train.lr_schedule import learning_rate
from lengthwise.session import stock_run
from lengthwise.session.planning import make_sampler
from lengthwise.session.profile_model import measure_as_rank
from lengthwise.session.run_model import load_stock
from lengthwise.session.run_parts import RunInputs
from tests.chats import write_tokenizer
from tests.cli.runs import lengthwise, make_corpus
from tests.session.models import train_alone

EXACT = 1e-6
"""transformers computes losses, norms and rotations in float32 whatever the weights are."""
NUM_STEPS, STOPPED = 4, 2
SHARED = ("--method", "ring", "--degree", 2, "plan.shard_gradients=all", "plan.max_stages=1")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return make_corpus(tmp_path_factory.mktemp("texts") / "texts")


@pytest.fixture(scope="module")
def gemma2(tmp_path_factory):
    """Soft caps, a sliding window in every other layer, and a tied embedding with a scale."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    folder = tmp_path_factory.mktemp("hf") / "gemma2"
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = Gemma2Config(
        vocab_size=300, num_key_value_heads=2, head_dim=8, sliding_window=40, max_position_embeddings=1024, **sizes
    )
    Gemma2ForCausalLM(config).save_pretrained(folder)
    write_tokenizer(folder)
    (folder / "README.md").write_text("a model card")
    return folder


@pytest.fixture(scope="module")
def options(corpus, gemma2, tmp_path_factory):
    profile = tmp_path_factory.mktemp("profile") / "profile.json"
    return [
        f"data.index={corpus}", "data.max_length=120", "data.over_length=split", "data.tokens_per_step=480",
        "data.validation_share=0.15", f"model.hf={gemma2}", "train.dtype=float64", "train.validate_every=2",
        "optim.lr=1e-2", "optim.eps=1e-3", "optim.schedule=constant", "optim.warmup_steps=2", f"plan.profile={profile}",
        "train.sample_every=4", "train.sample_prompts=[file]",
        "train.sample_tokens=3", "plan.policy=static",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def trained(options, tmp_path_factory):
    """Two steps on two ranks that share every sequence, two more on one."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    lengthwise("train", *options, f"run_folder={folder}", f"train.steps={STOPPED}", *SHARED, "--nproc", 2)
    lengthwise("train", "--resume", folder, f"train.steps={NUM_STEPS}", "plan.method=", "plan.degree=null")
    return RunFolder(folder)


@pytest.fixture(scope="module")
def alone(options, gemma2):
    """The same steps by an ordinary loop on one device: losses, validation losses and the model."""
    from transformers import AutoModelForCausalLM

    config = load(None, [*options, f"train.steps={NUM_STEPS}"])
    corpus, validation = open_corpus(config.data), open_validation(config.data)
    model = AutoModelForCausalLM.from_pretrained(gemma2, dtype=torch.float64).train()

    def sum_of_losses(model, id, source=corpus):
        tokens = torch.from_numpy(source.tokens(id).astype("int64"))[None]
        return model(input_ids=tokens, labels=tokens).loss * (tokens.shape[1] - 1)

    def batches(validated):
        for step, batch in enumerate(islice(make_sampler(config, corpus), NUM_STEPS)):
            if step == STOPPED:
                validated.append(validation_loss())
            yield batch.ids
        validated.append(validation_loss())

    @torch.no_grad()
    def validation_loss():
        total = sum(float(sum_of_losses(model, id, validation)) for id in range(len(validation)))
        return total / (validation.lengths.num_tokens - len(validation))

    validated = []
    losses = train_alone(
        model, batches(validated), sum_of_losses, num_targets=lambda id: int(corpus.lengths.lengths[id]) - 1,
        lr=lambda step: learning_rate(config.optim, step, NUM_STEPS), eps=config.optim.eps,
    )  # fmt: skip
    return losses, validated, model


def test_two_ranks_and_then_one_train_as_an_ordinary_loop_does(trained, alone):
    losses, _, model = alone
    rows = trained.read_metrics()
    assert [row["loss/avg"] for row in rows] == pytest.approx(losses, rel=EXACT)
    assert losses[-1] < losses[0] - 0.1
    weights = load_weights(latest(trained.checkpoints), None)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(weights[name], parameter.detach(), rtol=0, atol=EXACT)
    plans = trained.read_plans()
    assert [plans[step].strategy_words for step in range(NUM_STEPS)] == ["1 x <2,1> ring z2"] * 2 + [
        "1 x <1,1> dense"
    ] * 2
    assert rows[0]["plan/policy"] == "static" and rows[0]["perf/tflops_per_gpu"] > 0


def test_its_validation_loss_is_that_of_stock_calls(trained, alone):
    rows = trained.read_metrics()
    found = {row["step"] + 1: row["val/loss"] for row in rows if "val/loss" in row}
    assert found == pytest.approx({STOPPED: alone[1][0], NUM_STEPS: alone[1][1]}, rel=EXACT)
    assert (trained.checkpoints / "best").read_text() == f"step_{NUM_STEPS:08d}\n"


@pytest.mark.deep
def test_two_stages_and_then_one_rank_train_and_validate_as_an_ordinary_loop_does(options, alone, tmp_path):
    folder, staged = tmp_path / "run", "plan.policy=tests.cli.staged_policy:in_stages"
    lengthwise("train", *options, staged, f"run_folder={folder}", f"train.steps={STOPPED}", "--nproc", 2)
    lengthwise("train", "--resume", folder, f"train.steps={NUM_STEPS}", "plan.policy=static")
    run, (losses, validated, _) = RunFolder(folder), alone
    assert [row["loss/avg"] for row in run.read_metrics()] == pytest.approx(losses, rel=EXACT)
    found = [row["val/loss"] for row in run.read_metrics() if "val/loss" in row]
    assert found == pytest.approx(validated, rel=EXACT)
    plans = run.read_plans()
    assert [plans[step].strategy_words for step in range(NUM_STEPS)] == ["1 x <1,2> dense"] * 2 + [
        "1 x <1,1> dense"
    ] * 2


@torch.no_grad()
@pytest.mark.deep
def test_compiled_layers_train_and_validate_as_an_ordinary_loop_does(options, alone, tmp_path):
    run, (losses, validated, _) = RunFolder(tmp_path / "run"), alone
    changes = ["train.compile=true", f"run_folder={run.path}", f"train.steps={NUM_STEPS}"]
    lengthwise("train", *options, *changes, is_cold=True)
    rows = run.read_metrics()
    assert [row["loss/avg"] for row in rows] == pytest.approx(losses, rel=EXACT)
    assert [row["val/loss"] for row in rows if "val/loss" in row] == pytest.approx(validated, rel=EXACT)
    assert [row["compile/recompiles"] for row in rows][1:] == [0] * (NUM_STEPS - 1)
    assert any(run.compiler.iterdir())


def test_its_samples_are_the_likeliest_tokens(trained, alone):
    """Prompts are bytes, as the index has them."""
    tokens = list(b"file")
    for _ in range(3):
        tokens.append(int(alone[2].eval()(torch.tensor([tokens])).logits[0, -1, :257].argmax()))
    (first, last) = trained.read_samples()
    assert [first["step"], last["step"]] == [STOPPED - 1, NUM_STEPS - 1]
    assert last["text"].encode() == bytes(tokens[4:])


def test_it_is_exported_with_all_that_it_came_with(trained, gemma2, alone, tmp_path):
    from transformers import AutoModelForCausalLM

    out = tmp_path / "out"
    lengthwise("export", trained.path, "--out", out)
    assert {path.name for path in out.iterdir()} == {path.name for path in gemma2.iterdir()}
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (gemma2, out))
    assert after == {**before, "dtype": "float64"}
    for name in {path.name for path in gemma2.iterdir()} - {"config.json", "model.safetensors"}:
        assert (out / name).read_bytes() == (gemma2 / name).read_bytes(), name
    model = AutoModelForCausalLM.from_pretrained(out, dtype="auto")
    tokens = torch.arange(90)[None]
    with torch.no_grad():
        torch.testing.assert_close(model(tokens).logits, alone[2].eval()(tokens).logits, rtol=0, atol=1e-4)
    assert "report" in lengthwise("report", trained.path).stdout
    ledger = trained.read_json("ledger.json")
    assert ledger["steps"] == NUM_STEPS and ledger["tokens_seen"] > 0


def test_the_plans_of_a_file_are_computed_with_weights_where_costs_place_them(trained, gemma2, options, monkeypatch):
    changes = [f"plan.file={trained.plans}", "train.steps=2"]
    config = load(None, [*options, *changes, "cluster.name=1xcpu"])
    placed = []

    def place(run, chosen, cost, longest):
        placed.append(longest)
        return cost, lambda plan: 0

    monkeypatch.setattr(stock_run, "place_weights", place)
    monkeypatch.setattr(stock_run, "check_executable", lambda *_, **__: None)  # two ranks planned the first steps
    corpus, stock = open_corpus(config.data), read_stock_model(gemma2)
    world = DistContext(rank=0, size=1, device=torch.device("cpu"))
    inputs = RunInputs(
        config=config, corpus=corpus, validation=None, cluster=find_cluster(config, world), world=world,
        folder=trained, quiet=True,
    )  # fmt: skip
    if not torch.distributed.is_initialized():  # by an earlier test of this process
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    stock_run.stock_parts(inputs, stock, load_stock(config, stock))
    assert placed == [corpus.lengths.max_length]


def test_weights_that_are_not_all_there_are_refused(gemma2, options, tmp_path):
    from safetensors.torch import load_file, save_file

    folder = shutil.copytree(gemma2, tmp_path / "hf")
    weights = load_file(folder / "model.safetensors")
    config = load(None, [*options, f"model.hf={folder}"])
    save_file(
        {name: value for name, value in weights.items() if name != "model.norm.weight"}, folder / "model.safetensors"
    )
    with pytest.raises(InputError, match=r"lack model\.norm\.weight, which Gemma2ForCausalLM has"):
        load_stock(config, read_stock_model(folder))
    (folder / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(InputError, match=r"does not load .*; give a folder as save_pretrained writes it"):
        load_stock(config, read_stock_model(folder))


def test_what_computes_own_models_alone_says_so(trained, options, corpus, cli, tmp_path):
    code, _, error = cli("analyze", corpus, "--metric", f"loss={trained.path}")
    assert code == 2 and "trained a Gemma2ForCausalLM of transformers" in error
    with pytest.raises(InputError, match=r"`lengthwise train` measures it by itself, before its first step"):
        measure_as_rank(load(None, options), tmp_path / "profile.json", packs=[(64,)], repeats=1)
    (tmp_path / "model.json").write_text('{"architecture": "MambaForCausalLM"}')
    with pytest.raises(InputError, match=r"trained a MambaForCausalLM, whose family has no cost model"):
        RunFolder(tmp_path).read_spec()


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        (
            "plan.method=metp",
            "plan.method=metp is not for models that transformers computes, such as this Gemma2ForCausalLM",
        ),
        ("plan.methods=ulysses,metp", "plan.methods=ulysses,metp is not for models that transformers computes"),
        ("plan.shapes=2", "their layers are compiled for any number of tokens; leave it out"),
        ("plan.workers=1", "their costs are corrected from step to step"),
        ("model.implementation=lengthwise", "architectures = ['Gemma2ForCausalLM'] is not supported"),
    ],
)
def test_what_it_cannot_do_is_refused_before_ranks_are_started(cli, options, tmp_path, setting, words):
    code, _, error = cli("train", *options, f"run_folder={tmp_path / 'run'}", setting)
    assert code == 2 and words in error, error
    assert len(error.splitlines()) == 1 and not (tmp_path / "run").exists()
