"""Configurations and ``prepare`` share one set of settings; every enumeration is that of the code behind it."""

import inspect
import pydoc
from typing import get_args, get_type_hints

import pytest
from pydantic import BaseModel

import lengthwise
from lengthwise.config import choices
from lengthwise.config.optimizer_settings import STATE
from lengthwise.config.prepare_keywords import PrepareKeywords
from lengthwise.config.prepare_options import PrepareOptions
from lengthwise.config.run_config import Config, DataConfig
from lengthwise.config.setting_names import OTHER_MEANING
from lengthwise.core.lr_scaling import RULES, SIZES
from lengthwise.core.pipeline_config import Method
from lengthwise.plan.policies import POLICIES
from lengthwise.plan.space.search_space import RecomputeMode
from lengthwise.session.planning import RANDOM

SECTIONS = {"": Config} | {
    name: field.annotation
    for name, field in Config.model_fields.items()
    if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
}
OTHER_TYPE = {
    "steps",
    "epochs",
    "methods",
    "metric",
    "lr",
    "recompute",
    "profile",
    "compile",
    "shard_gradients",
    "slices",
}
"""Names of the same meaning that take something else in ``prepare``, or have another default; both say so."""


def shared():
    """Name, section and both fields of what configurations and ``prepare`` both have."""
    for section, settings in SECTIONS.items():
        for name in settings.model_fields.keys() & PrepareOptions.model_fields.keys():
            yield name, section, settings.model_fields[name], PrepareOptions.model_fields[name]


def test_what_both_have_is_the_same_but_for_exactly_these():
    assert {"objective", "cost", "workers"} == OTHER_MEANING
    differing = {
        name
        for name, _, field, option in shared()
        if (field.annotation, field.default, repr(field.metadata), field.description)
        != (option.annotation, option.default, repr(option.metadata), option.description)
    }
    assert differing == OTHER_MEANING | OTHER_TYPE


@pytest.mark.parametrize("name", sorted(OTHER_MEANING | OTHER_TYPE))
def test_what_differs_says_so_on_both_sides(name):
    (section, field, option) = next(tuple(rest) for other, *rest in shared() if other == name)
    assert "prepare" in field.description.lower(), f"{section}.{name}"
    assert "onfiguration" in option.description, name


def test_every_setting_is_documented_in_sentences():
    for section, settings in (*SECTIONS.items(), ("prepare", PrepareOptions)):
        for name, field in settings.model_fields.items():
            if name not in SECTIONS:
                text = " ".join((field.description or "").split())
                assert text[:1].isalpha() and text[-1:] in (".", ")"), f"{section}.{name}: {text}"


def test_enumerations_are_those_of_the_code():
    same = {
        choices.PolicyName: tuple(POLICIES),
        choices.OptimizerName: tuple(STATE),
        choices.LrRule: RULES,
        choices.BatchSize: SIZES,
        choices.MethodName: (RANDOM, *(str(method) for method in Method)),
        choices.Recompute: tuple(str(mode) for mode in RecomputeMode),
    }
    for spelt, known in same.items():
        assert sorted(get_args(spelt)) == sorted(known)


def test_a_policy_is_checked_by_name():
    assert DataConfig(order="sorted").order == "sorted"
    assert Config().plan.policy == PrepareOptions().policy == "auto"
    assert Config().plan.max_degree is PrepareOptions().max_degree is None
    assert Config().plan.max_stages is PrepareOptions().max_stages is None


def test_the_keywords_of_prepare_are_its_options_and_its_signature():
    parameters = inspect.signature(lengthwise.prepare).parameters
    keywords, fields = get_type_hints(PrepareKeywords), PrepareOptions.model_fields
    assert list(keywords) == list(fields) == list(parameters)[2:]
    assert list(parameters)[:2] == ["model", "corpus"]
    for name, field in fields.items():
        assert parameters[name].default == field.get_default(call_default_factory=True), name
        assert parameters[name].annotation == keywords[name], name
        assert keywords[name] == get_type_hints(PrepareOptions)[name], name  # bounds and validation left out
    assert "Literal['padded'" in pydoc.render_doc(lengthwise.prepare)
