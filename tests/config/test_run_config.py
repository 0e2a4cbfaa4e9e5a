"""Configurations: every mistake named at once, with the nearest key; what is saved loads as the same."""

from operator import attrgetter

import pytest

from lengthwise.config.foreign_names import SETTING_OF
from lengthwise.config.run_config import Config, check, load, load_saved
from lengthwise.core.errors import InputError
from lengthwise.core.read_yaml import parse_yaml
from lengthwise.core.wording import nearest, with_nearest


def test_saved_configurations_load_as_they_were(tmp_path):
    config = check({"name": "a", "data": {"max_length": 99}, "optim": {"lr": 1e-4, "betas": [0.8, 0.9]}})
    config.save(tmp_path / "config.yaml")
    assert load(tmp_path / "config.yaml", []) == config


def test_overrides_reach_every_depth_and_beat_the_file(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("optim: {lr: 1e-4}\n")  # PyYAML reads 1e-4 as text
    config = load(path, ["optim.lr=2e-3", "name=b", "train.tensorboard=true", "data.max_length=null"])
    assert config.optim.lr == 2e-3
    assert config.name == "b"
    assert config.train.tensorboard is True
    assert config.data.max_length is None
    assert load(path, []).optim.lr == 1e-4


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("7", 7),
        ("-7", -7),
        ("+7", 7),
        ("0", 0),
        ("1_000", 1000),
        ("0x1F", 31),
        ("1.5", 1.5),
        ("1.0e-8", 1e-8),
        (".5", 0.5),
        ("010", "010"),
        ("1:30", "1:30"),
        ("1:30.5", "1:30.5"),
        ("2024-01-01", "2024-01-01"),
        ("1e-3", "1e-3"),
        ("0b1", "0b1"),
        ("true", True),
        ("~", None),
        ("a: {b: [1, x]}", {"a": {"b": [1, "x"]}}),
        ("", None),
    ],
)
def test_values_of_yaml_are_what_they_look_like(text, value):
    assert parse_yaml(text) == value and type(parse_yaml(text)) is type(value)


def test_lists_and_names_are_asked_for_in_words():
    with pytest.raises(InputError) as caught:
        load(None, ["optim.betas=0.9", "train.sample_prompts=hello", "name=a/b"])
    text = str(caught.value)
    assert "optim.betas: a list is needed, such as '[first, second]', not 0.9" in text
    assert "train.sample_prompts: a list is needed" in text
    assert "name: letters, digits, - and _ are needed, also . but not first, not 'a/b'" in text


@pytest.mark.parametrize(
    "text",
    [
        "set #2",
        "&x",
        "*x",
        "[x]",
        "{x}",
        "{a: b}",
        "[1",
        "yes",
        "1_000",
        "a: b",
        "1.10",
        "a's",
        "~",
        "# a",
        "!x y",
        "|",
    ],
)
def test_a_setting_that_is_text_is_taken_as_it_is_given(text, tmp_path):
    (tmp_path / "config.yaml").write_text("data: {index: other}\n")
    keys = ["run_folder", "data.index", "data.validation", "model.hf", "plan.file", "plan.profile", "cluster.name"]
    for key in keys:
        config = load(tmp_path / "config.yaml" if key == "data.index" else None, [f"{key}={text}"])
        assert attrgetter(key)(config) == text


def test_a_text_in_quotes_is_what_they_hold():
    assert load(None, ["run_folder='set #2'"]).run_folder == load(None, ['run_folder="set #2"']).run_folder == "set #2"


def test_what_no_setting_is_cut_to_is_refused():
    """A comment, or the name of a node, is no part of a number or a word, and does not stand for null."""
    given = ["train.steps=5 #x", "train.epochs=#5", "optim.schedule=cosine #x", "train.patience=&x", "plan.degree=&x 2"]
    with pytest.raises(InputError) as caught:
        load(None, given)
    told = str(caught.value).splitlines()
    assert len(told) == 1 + len(given) and all(any(key.split("=")[0] in line for line in told) for key in given)
    assert load(None, ["train.sample_every=1", "train.sample_prompts=['a #b', c]"]).train.sample_prompts == (
        "a #b",
        "c",
    )


def test_null_is_text_left_empty(tmp_path):
    (tmp_path / "config.yaml").write_text("data:\n  index:\nmodel: {hf: null}\nplan: {file: ~}\n")
    config = load(tmp_path / "config.yaml", ["plan.profile=null"])
    assert (config.data.index, config.model.hf, config.plan.file, config.plan.profile) == ("", "", "", "")


def test_any_saved_configuration_loads_as_it_was(tmp_path):
    for name in ("010", "1e-3", "1_000", "true", "null", "0x1F", "1.5", "on", "2024-01-01"):
        config = check({"name": name, "data": {"index": f"{name}: [x] # {name}"}, "seed": 10})
        config.save(tmp_path / "config.yaml")
        assert load(tmp_path / "config.yaml", []) == config


def test_all_mistakes_are_named_at_once_with_the_nearest_key():
    with pytest.raises(InputError) as caught:
        load(None, ["optim.lrr=1", "trainn.steps=2", "train.steps=0", "plan.policy=fast"])
    text = str(caught.value)
    for expected in (
        "4 errors",
        "optim.lrr: unknown key; did you mean optim.lr?",
        "did you mean train?",
        "train.steps",
    ):
        assert expected in text
    assert "'hydraulis', 'auto' or MODULE:FUNCTION of your own, not 'fast'" in text


@pytest.mark.parametrize("foreign", SETTING_OF)
def test_names_of_other_trainers_are_answered_with_a_setting_that_exists(foreign):
    node = Config
    for part in SETTING_OF[foreign].split("."):
        node = node.model_fields[part].annotation
    for key in (foreign, f"train.{foreign}", f"optim.{foreign.replace('_', '-').upper()}"):
        with pytest.raises(InputError, match=f"unknown key; did you mean {SETTING_OF[foreign]}[?]"):
            load(None, [f"{key}=1"])


@pytest.mark.parametrize(
    ("key", "ours"),
    [
        ("train.grad_clip", "optim.clip_norm"),
        ("train.max_grad_norm", "optim.clip_norm"),
        ("optim.grad_clip", "optim.clip_norm"),
        ("train.lr", "optim.lr"),
        ("optim.steps", "train.steps"),
        ("train.max_length", "data.max_length"),
    ],
)
def test_a_setting_is_found_by_its_name_elsewhere(key, ours):
    with pytest.raises(InputError, match=f"{key}: unknown key; did you mean {ours}[?]"):
        load(None, [f"{key}=1"])


@pytest.mark.parametrize(
    ("text", "overrides", "message"),
    [
        (None, [], "no configuration at"),
        ("a: [", [], "is not YAML"),
        ("- 1\n", [], "tree of settings, not a list"),
        ("{}", ["lr"], "is not key=value"),
        ("name: x", ["name.y=1"], "is a value, not a section"),
    ],
)
def test_files_and_overrides_that_cannot_be_read_are_refused(text, overrides, message, tmp_path):
    path = tmp_path / "config.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(InputError, match=message):
        load(path, overrides)


CONTRADICTIONS = {
    "train.steps=3 and train.epochs=2 are both set; leave one of them out, or set it to null where a file has it": {
        "train": {"steps": 3, "epochs": 2}
    },
    "data.tokens_per_step=3 and data.sequences_per_step=4 are both set; leave one of them out": {
        "data": {"tokens_per_step": 3, "sequences_per_step": 4}
    },
    "data.count_padding says what data.tokens_per_step counts; leave data.sequences_per_step out": {
        "data": {"count_padding": True, "sequences_per_step": 4}
    },
    "data.index=a and data.mixture are both set": {"data": {"index": "a", "mixture": [{"index": "b"}]}},
    "data.validation=a and data.validation_share=0.1 are both set": {
        "data": {"validation": "a", "validation_share": 0.1}
    },
    "train.patience=2 needs something to validate on; set data.validation": {"train": {"patience": 2}},
    "train.validate_every=5 needs something to validate on": {"train": {"validate_every": 5}},
    "train.epochs=2: with plan.form_batches, groups decide": {
        "train": {"epochs": 2}, "plan": {"form_batches": True, "policy": "dcp-intra"}
    },
    "samples of text need both how often and of what": {"train": {"sample_every": 3}},
    "samples of text need both how often": {"train": {"sample_prompts": ["a"]}},
    "no model preset 'lama-tiny'; did you mean llama-tiny?": {"model": {"preset": "lama-tiny"}},
    "model.preset=bert-tiny and model.hf='.' are two models; leave one": {"model": {"preset": "bert-tiny", "hf": "."}},
    "model.num_layers=3 is for presets; a model of model.hf is as its": {"model": {"hf": ".", "num_layers": 3}},
}  # fmt: skip


@pytest.mark.parametrize("message", CONTRADICTIONS)
def test_settings_that_contradict_one_another_are_refused_where_they_are_read(message):
    with pytest.raises(InputError) as refused:
        check(CONTRADICTIONS[message])
    headline, line = str(refused.value).splitlines()
    assert headline == "the configuration has an error:" and line.startswith(f"  {message}")


def test_contradictions_of_all_sections_are_named_at_once():
    with pytest.raises(InputError) as refused:
        check({
            "train": {"steps": 3, "epochs": 2}, "data": {"tokens_per_step": 3, "sequences_per_step": 4},
            "optim": {"lr": -1},
        })  # fmt: skip
    assert str(refused.value).startswith("the configuration has 3 errors:\n")


def test_a_file_is_not_blamed_for_overrides(tmp_path):
    path = tmp_path / "config.yaml"
    for text, overrides, beginning in (
        ("train: {steps: 3}", ["optim.nme=sgd"], "the configuration has an error:"),
        ("train: {steps: 3}", ["train.epochs=2"], "the configuration has an error:"),
        ("train: {steps: -3}", ["train.steps=3", "optim.nme=sgd"], "the configuration has an error:"),
        ("optim: {nme: sgd}", ["train.steps=3"], f"{path}: the configuration has an error:"),
        ("optim: {nme: sgd}", ["train.steps=-3"], f"{path} and the overrides: the configuration has 2 errors:"),
    ):
        path.write_text(text)
        with pytest.raises(InputError) as refused:
            load(path, overrides)
        assert str(refused.value).splitlines()[0] == beginning


def test_an_empty_section_is_its_defaults(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("train:\ndata:\n")
    assert load(path, []) == Config()
    assert load(path, ["train.steps=3"]).train.steps == 3


def test_what_a_section_is_and_how_it_is_nested_is_told():
    with pytest.raises(InputError) as refused:
        check({"train.steps": 4, "model": 5})
    assert str(refused.value).splitlines()[1:] == [
        "  model: its settings stand below it, as name: value, not 5",
        "  train.steps: unknown key; nest it, as in train: {steps: 4}",
    ]


def test_names_are_suggested_whatever_their_capitals():
    assert nearest("h100", ["H100-80GB", "A100-40GB"]) == "did you mean H100-80GB?"
    assert nearest("LAMA-7B", ["llama-7b"]) == "did you mean llama-7b?"
    assert with_nearest("one of 'auto', 'static'", "AUTO") == "one of 'auto', 'static'; did you mean auto?"


def test_configurations_are_frozen():
    with pytest.raises(ValueError, match="frozen"):
        Config().seed = 3


@pytest.mark.parametrize(
    ("override", "word"),
    [
        ("plan.policy=atuo", "auto"), ("plan.method=ulyses", "ulysses"), ("optim.name=adamv", "adamw"),
        ("optim.schedule=cosin", "cosine"), ("train.dtype=bfloat61", "bfloat16"), ("train.schedule=gipe", "gpipe"),
        ("plan.recompute=al", "all"), ("data.order=sortd", "sorted"), ("data.over_length=spilt", "split"),
    ],
)  # fmt: skip
def test_a_mistyped_word_is_told_the_nearest(override, word):
    with pytest.raises(InputError, match=f"did you mean {word}\\?"):
        load(None, [override])


def test_whole_numbers_may_have_exponents(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("name: 1e3\ndata: {tokens_per_step: 1e6, max_length: 1.5e+3}\ntrain: {steps: 1e3}\nseed: 1E2\n")
    config = load(path, ["train.checkpoint_every=15e1", "plan.max_degree=2e0"])
    numbers = config.data.tokens_per_step, config.data.max_length, config.train.steps, config.train.checkpoint_every
    assert numbers == (1_000_000, 1500, 1000, 150)
    assert (config.seed, config.plan.max_degree, config.name) == (100, 2, "1e3")
    for setting in ("data.tokens_per_step", "train.steps"):
        for number in ("1.5e0", "1e-3", "1e3x", "1e99"):
            with pytest.raises(InputError, match=setting):
                load(None, [f"{setting}={number}"])


def test_numbers_of_tokens_have_suffixes(tmp_path):
    (tmp_path / "config.yaml").write_text("data: {max_length: 32Ki}\n")
    config = load(tmp_path / "config.yaml", ["data.tokens_per_step=1.5M", "plan.max_tokens=64K"])
    assert (config.data.max_length, config.data.tokens_per_step, config.plan.max_tokens) == (32_768, 1_500_000, 64_000)
    with pytest.raises(InputError, match="valid integer"):
        load(None, ["data.max_length=32X"])


def test_a_saved_configuration_is_read_though_its_policy_is_code_of_the_user(tmp_path):
    config = check({"plan": {"policy": "mine:policy"}})
    config.save(tmp_path / "config.yaml")
    assert load_saved(tmp_path / "config.yaml") == config
    with pytest.raises(InputError, match="is code that a file names"):
        load(tmp_path / "config.yaml", [])
