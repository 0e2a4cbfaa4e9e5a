"""Every setting that a message names exists, and each surface spells it as its users set it."""

import ast
import gc
import pickle
import re
from functools import cache
from inspect import signature
from pathlib import Path

import pytest

import lengthwise
from lengthwise.cli.commands import compare
from lengthwise.config.prepare_options import PrepareOptions
from lengthwise.config.run_config import Config
from lengthwise.config.setting_names import MODEL_WORDS, as_option, as_trainer_argument
from lengthwise.core.errors import InfeasibleError, InputError, Setting, as_key, errors_spelt
from lengthwise.session.plan_lengths import PlanningOptions
from lengthwise.session.planning_args import COMMAND_LINE, PYTHON

SOURCE = Path(lengthwise.__file__).parent
KEYS = {
    f"{name}.{key}" for name, field in Config.model_fields.items()
    for key in getattr(field.annotation, "model_fields", ())
}  # fmt: skip
NAMED = re.compile(r"(?<![\w./])(?:data|plan|train|optim|model|cluster)\.[a-z_]\w*\b(?!\()")
NO_SETTINGS = {
    "model.json", "model.safetensors", "model.layers", "model.embed_tokens", "model.norm", "model._orig_mod",
}  # fmt: skip
"""Names of files, tensors and methods that look like settings."""
SEVERAL_SURFACES = ("core", "index", "data", "cost", "plan", "models", "sim", "runtime")
"""Packages whose errors users of configurations, of ``prepare``, of ``lengthwise.plan`` and of commands may meet."""
ELSEWHERE = " (of configurations alone)"


@cache
def trees():
    """The nodes of every file of the package, none of which is garbage."""
    gc.disable()
    try:
        return {path: list(ast.walk(ast.parse(path.read_text()))) for path in sorted(SOURCE.rglob("*.py"))}
    finally:
        gc.enable()


@pytest.fixture(scope="module", autouse=True)
def _forget_trees():
    """A million objects, which would slow every later garbage collection."""
    yield
    trees.cache_clear()


def messages():
    """Each file and text that is no docstring, of the whole package."""
    for path, nodes in trees().items():
        alone = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        for node in nodes:
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in alone:
                yield path.relative_to(SOURCE), node.value


def test_every_setting_that_a_message_names_exists():
    assert {setting.value for setting in Setting} - {"model.*"} <= KEYS
    named = {(str(path), key) for path, text in messages() for key in NAMED.findall(text)}
    assert len(named) > 60
    assert {(path, key) for path, key in named if key not in KEYS | NO_SETTINGS} == set()


def test_errors_that_several_surfaces_show_name_settings_by_fields():
    written = {
        (str(path), key) for path, text in messages() for key in NAMED.findall(text)
        if path.parts[0] in SEVERAL_SURFACES and path.name != "errors.py"
        and "config.run_config import" not in (SOURCE / path).read_text()  # it takes a configuration and nothing else
    }  # fmt: skip
    allowed = {("data/sampling_bias.py", "optim.lr_scaling")}  # of the report that `lengthwise stats` prints
    assert {(path, key) for path, key in written if key not in NO_SETTINGS} == allowed
    used = {
        node.attr for nodes in trees().values() for node in nodes
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "Setting"
    }  # fmt: skip
    assert used == {setting.name for setting in Setting}


@pytest.mark.parametrize("setting", Setting)
def test_each_surface_spells_settings_that_it_has(setting):
    arguments = {*signature(lengthwise.compare).parameters, *PlanningOptions.__annotations__}
    options = {f"--{name.replace('_', '-')}" for name in signature(compare.run).parameters}
    for spell, known in (
        (as_key, KEYS),
        (as_option, set(PrepareOptions.model_fields)),
        (PYTHON, arguments),
        (COMMAND_LINE, options),
    ):
        spelt = spell(setting).removesuffix(" (timeout_s= of prepare)")
        if spelt in (*MODEL_WORDS.values(), "settings model.*"):
            assert setting in MODEL_WORDS
            continue
        assert spelt in known or (spell is not as_key and spelt == setting.value + ELSEWHERE)


@pytest.mark.parametrize(
    ("spell", "spelt"),
    [
        (as_key, "Set data.max_length=3, optim.name=sgd or plan.max_tokens"),
        (as_option, "Set max_length=3, optimizer='sgd' or max_tokens"),
        (PYTHON, f"Set max_length=3, optim.name{ELSEWHERE}=sgd or plan.max_tokens{ELSEWHERE}"),
        (COMMAND_LINE, f"Set --max-length=3, optim.name{ELSEWHERE}=sgd or plan.max_tokens{ELSEWHERE}"),
    ],
)
def test_an_error_is_spelt_for_those_who_read_it(spell, spelt):
    text = f"Set {Setting.MAX_LENGTH}=3, {Setting.OPTIMIZER}=sgd or {Setting.MAX_TOKENS}"
    with pytest.raises(InfeasibleError) as raised, errors_spelt(spell):
        raise InfeasibleError(text, what="sequence 4", value=7, limit=3, unit="tokens")
    error = pickle.loads(pickle.dumps(raised.value))
    assert str(error) == str(raised.value) == spelt
    for same in (error, raised.value.with_message("longer")):
        assert (same.what, same.value, same.limit, same.unit) == ("sequence 4", 7, 3, "tokens")
    assert error.remedies == (Setting.MAX_LENGTH, Setting.OPTIMIZER, Setting.MAX_TOKENS)
    assert str(InputError(f"rank 1: {error.marked}")).endswith(
        "Set data.max_length=3, optim.name=sgd or plan.max_tokens"
    )


@pytest.mark.parametrize("setting", Setting)
def test_the_trainer_spells_settings_by_its_arguments(setting):
    transformers = pytest.importorskip("transformers")
    spelt = as_trainer_argument(setting)
    option = spelt.removeprefix('lengthwise={"').removesuffix('": ...}')
    known = {*vars(transformers.TrainingArguments)["__dataclass_fields__"], "policy", *MODEL_WORDS.values()}
    of_several = "per_device_train_batch_size x gradient_accumulation_steps x ranks"
    assert spelt in known | {of_several, setting.value + ELSEWHERE} or option in PrepareOptions.model_fields


def test_values_that_an_error_names_are_spelt_for_the_trainer():
    text = (
        f"Set {Setting.OPTIMIZER}=sgd, {Setting.OPTIMIZER}=adafactor, {Setting.COMPILE}=true, {Setting.RECOMPUTE}=all"
    )
    text += (
        f", {Setting.MAX_LENGTH}=30, {Setting.OPTIMIZER}=<lambda>, {Setting.OPTIMIZER}=NAdam, or {Setting.LR}=1.5e-3."
    )
    assert InputError(text).spelt(as_trainer_argument) == (
        'Set optim="sgd", lengthwise={"optimizer": "adafactor"}, torch_compile=True, lengthwise={"recompute": "all"}, '
        'lengthwise={"max_length": 30}, lengthwise={"optimizer": <lambda>}, lengthwise={"optimizer": NAdam}, '
        "or learning_rate=1.5e-3."
    )


def test_values_that_an_error_names_are_spelt_as_python_has_them():
    text = (
        f"Set {Setting.RECOMPUTE}=none, {Setting.OPTIMIZER}=NAdam, {Setting.COMPILE}=false, {Setting.MAX_STAGES}=1, "
        f"{Setting.MAX_LENGTH}=<length> or {Setting.MAX_TOKENS}=30."
    )
    assert InputError(text).spelt(as_option) == (
        "Set recompute='none', optimizer=NAdam, compile=False, max_stages=1, max_length=<length> or max_tokens=30."
    )


@pytest.mark.parametrize("policy", ["static", "auto"])
def test_functions_and_commands_name_their_own_arguments(policy):
    lengths = [100, 2_000_000]
    wanted = {"model": "llama-7b", "cluster": "8xH100-80GB", "max_degree": 1, "max_stages": 1}
    with pytest.raises(
        InfeasibleError, match=r"Give max_length=\d+ or less, .* with max_degree, max_stages, methods"
    ) as raised:
        lengthwise.plan(lengths, policy=policy, **wanted)
    error = raised.value
    assert (error.what, error.value, error.unit) == ("sequence 1", 2_000_000, "tokens")
    assert f"max_length={error.limit} or less" in str(error)
    assert Setting.MAX_LENGTH in error.remedies
    with pytest.raises(InputError, match=r"over max_length 100; .*Raise max_length, or set over_length to drop"):
        lengthwise.plan(lengths, policy=policy, max_length=100, over_length="error", **wanted)


def test_the_batch_sampler_names_its_own_arguments():
    with pytest.raises(InputError, match=r"^window 0: at least 1 sequence is needed"):
        lengthwise.BatchSampler(
            [3, 4], tokens_per_micro_batch=8, tokens_per_step=8, order="windowed", window=0, rank=0, num_ranks=1
        )
