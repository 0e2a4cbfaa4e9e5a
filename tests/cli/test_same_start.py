"""Every setting that ranks must share is compared before they train; paths and logging are not."""

import pytest

from lengthwise.cli.same_start import run_to_compare, settings_to_compare
from lengthwise.config.run_config import load
from lengthwise.core.specs import cluster_preset
from lengthwise.data.corpus import open_corpus
from lengthwise.runtime.comm.differences import differences
from lengthwise.session.trained_model import resolve_model
from tests.cli.runs import make_corpus, settings

MAY_DIFFER = [
    "name=other", "output=elsewhere", "run_folder=elsewhere", "train.log_every=5", "train.tensorboard=true",
    "train.timeline=false",
]  # fmt: skip
MUST_AGREE = [
    "seed=1", "data.max_length=77", "data.over_length=drop", "data.tokens_per_step=999", "data.sequences_per_step=3",
    "data.count_padding=true", "data.order=sorted", "data.metric=loss", "data.window=7", "data.prefetch=0",
    "model.preset=llama-mini", "model.vocab_size=999", "model.hf=folder", "cluster.name=1xcpu", "cluster.memory_gib=3",
    "plan.policy=static", "plan.file=plans.jsonl", "plan.profile=profile.json", "plan.max_tokens=512",
    "plan.max_degree=2", "plan.recompute=all", "plan.workers=2", "plan.look_ahead=9", "plan.shapes=4",
    "optim.name=adafactor", "optim.lr=1e-5", "optim.betas=[0.9,0.99]", "optim.eps=1e-6", "optim.momentum=0.5",
    "optim.weight_decay=0.5", "optim.clip_norm=0.5", "optim.warmup_steps=3", "optim.schedule=linear",
    "optim.lr_scaling=sqrt", "optim.lr_clamp=[0.5,2]",
    "train.steps=7", "train.compile=true", "train.dtype=bfloat16", "train.device=cpu", "train.schedule=gpipe",
    "train.checkpoint_every=3", "train.checkpoint_async=false", "train.keep_checkpoints=9", "train.timeout_s=77",
]  # fmt: skip


def keys_that_differ(*overrides):
    trees = [settings_to_compare(load(None, list(more)), resume=False, fall_back=False) for more in ((), overrides)]
    return [difference.key for difference in differences(dict(enumerate(trees)))]


@pytest.mark.parametrize("override", MUST_AGREE)
def test_ranks_with_another_setting_differ_in_it(override):
    assert keys_that_differ(override) == [override.partition("=")[0]]


def test_ranks_with_other_paths_or_logs_do_not_differ():
    assert keys_that_differ(*MAY_DIFFER) == []


@pytest.mark.parametrize("option", ["resume", "fall_back"])
def test_ranks_started_with_another_option_differ_in_it(option):
    config, options = load(None, []), {"resume": False, "fall_back": False}
    trees = (settings_to_compare(config, **options), settings_to_compare(config, **{**options, option: True}))
    assert [difference.key for difference in differences(dict(enumerate(trees)))] == [option]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return make_corpus(tmp_path_factory.mktemp("same") / "corpus")


def compared(corpus, tmp_path, *more, seed=0):
    from lengthwise.runtime.models.registry import build_model

    config = load(None, settings(corpus, tmp_path, *more))
    opened = open_corpus(config.data)
    spec = resolve_model(config, opened)
    model = build_model(spec, seed=seed)
    return run_to_compare(config, opened, spec=spec, cluster=cluster_preset("2xcpu"), model=model)


def keys(*trees):
    return [difference.key for difference in differences(dict(enumerate(trees)))]


def test_ranks_with_other_weights_differ_in_those(corpus, tmp_path):
    one, other = compared(corpus, tmp_path), compared(corpus, tmp_path, seed=1)
    assert keys(one, compared(corpus, tmp_path)) == []
    assert {key.rpartition(".")[0].partition(".")[0] for key in keys(one, other)} == {"model"}
    assert all(key.startswith("model.weights.") for key in keys(one, other))


def test_ranks_whose_index_has_the_same_lengths_and_other_tokens_differ(corpus, tmp_path):
    """Also where the index says it is the same: tokens at places all over it are compared."""
    one = compared(corpus, tmp_path)
    file = corpus / "tokens.bin"
    content = file.read_bytes()
    file.write_bytes(bytes(byte ^ 1 for byte in content[: len(content) // 3]) + content[len(content) // 3 :])
    try:
        assert keys(one, compared(corpus, tmp_path)) == [f"data.parts.{corpus.name}.some_tokens"]
    finally:
        file.write_bytes(content)


def test_ranks_whose_files_of_plans_or_costs_have_another_content_differ(corpus, tmp_path):
    file = tmp_path / "plans.jsonl"
    trees = []
    for content in ("1", "2"):
        file.write_text(content)
        trees.append(compared(corpus, tmp_path, f"plan.file={file}", f"plan.profile={file}"))
    assert keys(*trees) == ["files.plan.file", "files.plan.profile"]
