"""Every setting that a message names exists, and ``prepare`` names its own options."""

import ast
import re
from pathlib import Path

import pytest

import lengthwise
from lengthwise.config.prepare_options import PrepareOptions
from lengthwise.config.setting_names import named_as_options, option_of, setting_keys, spelt_for_prepare
from lengthwise.core.errors import InfeasibleError

SOURCE = Path(lengthwise.__file__).parent
KEY = re.compile(r"(?<![\w./])(?:data|plan|train|optim|model|cluster)\.[a-z_]\w*\b(?!\()")
NO_SETTINGS = {
    "model.json", "model.safetensors", "model.layers", "model.embed_tokens", "model.norm", "model._orig_mod",
}  # fmt: skip
"""Names of files, tensors and methods that look like settings."""


def messages():
    """Each file and text that is no docstring, of the whole package."""
    for path in sorted(SOURCE.rglob("*.py")):
        tree = ast.parse(path.read_text())
        nodes = list(ast.walk(tree))
        alone = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        for node in nodes:
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in alone:
                yield path.relative_to(SOURCE), node.value


def test_every_setting_that_a_message_names_exists():
    named = {(str(path), key) for path, text in messages() for key in KEY.findall(text)}
    assert len(named) > 60
    assert {(path, key) for path, key in named if key not in setting_keys() | NO_SETTINGS} == set()


def test_prepare_names_its_options_or_says_that_it_has_none():
    for path, text in messages():
        for key in set(KEY.findall(text)) & setting_keys():
            option, spelt = option_of(key), spelt_for_prepare(key)
            assert spelt == (option or f"{key} (of configurations alone)"), path
            assert option is None or option in PrepareOptions.model_fields


@pytest.mark.parametrize(
    ("message", "spelt"),
    [
        ("Set data.max_length=3 or plan.recompute=all.", "Set max_length=3 or recompute=all."),
        ("raise train.timeout_s (timeout_s= of prepare) if", "raise timeout_s if"),
        ("lower plan.max_tokens, please", "lower plan.max_tokens (of configurations alone), please"),
        ("set plan.objective", "set plan.objective (of configurations alone)"),
        ("set optim.name=sgd", "set optimizer=sgd"),
        ("lengthwise.data.size_buckets, model.layers.0 and data.json", None),
    ],
)
def test_messages_are_spelt_for_prepare(message, spelt):
    assert spelt_for_prepare(message) == (spelt or message)


def test_errors_name_settings_as_options():
    with pytest.raises(InfeasibleError, match=r"^Set max_length=3 or recompute=all$"), named_as_options():
        raise InfeasibleError("Set data.max_length=3 or plan.recompute=all")
