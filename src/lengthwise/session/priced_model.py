"""Sizes read from a ``config.json``, compared with the parameters of the model that transformers builds from it.

Families give the same field another meaning. Where transformers and torch are installed, its own class is built without
memory and counted; imports take seconds, so that models which this library computes itself are not compared.
"""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from lengthwise.core.errors import InputError
from lengthwise.core.read_file import read_json
from lengthwise.core.specs import ModelSpec
from lengthwise.models.hf_fields import TEXT_PARTS
from lengthwise.models.hf_sizes import ONLY_TEXT, PRICED_ONLY, read_priced_spec

SAID_BEYOND = 0.02
"""Relative difference of parameters from which it is said."""
REFUSED_BEYOND = 1.5
"""Times as many parameters, either way, from which a price would be that of another model."""
MAX_LAYERS = 1024
"""Layers of the largest model that is built to be counted."""


def read_compared_spec(folder: Path) -> ModelSpec:
    """The sizes of the model in a Hugging Face folder of any family, and in ``unpriced`` what is known to be wrong.

    Raises:
        InputError: as :func:`read_priced_spec`; or transformers builds a model of another size from the same file.
    """
    spec = read_priced_spec(folder)
    if spec.family != PRICED_ONLY or spec.num_layers > MAX_LAYERS:
        return spec
    path = folder / "config.json"
    counted = count_params(json.dumps(read_json(path, what="a model's configuration", finite=False)))
    if isinstance(counted, str):
        return _with_words(spec, f"what its fields do not say ({counted})")
    ratio = spec.num_params / counted
    if not 1 / REFUSED_BEYOND <= ratio <= REFUSED_BEYOND and ONLY_TEXT not in spec.unpriced:
        raise InputError(
            f"{path}: its fields read as a model of {spec.num_params:,} parameters, and transformers builds one of "
            f"{counted:,} from them, so its layers have no cost model; lengthwise.prepare measures such models "
            "instead"
        )
    if abs(ratio - 1) <= SAID_BEYOND:
        return spec
    return _with_words(spec, f"{spec.num_params:,} parameters are priced, transformers builds {counted:,}")


@lru_cache(maxsize=16)
def count_params(text: str) -> int | str:
    """Parameters of the language model that transformers builds from a configuration, as the text of its JSON.

    Of one with several parts, the text model is counted. Without one to count, the answer says why, in words.
    """
    try:
        import torch
        import transformers
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING
        from transformers.models.auto.modeling_auto import (
            MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
            MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        )
    except ImportError:
        return "transformers and torch are not there to compare with"
    values, classes = _text_part(json.loads(text))
    is_masked = any(str(name).endswith("ForMaskedLM") for name in classes)
    names = MODEL_FOR_MASKED_LM_MAPPING_NAMES if is_masked else MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    family = str(values.get("model_type"))
    name = names.get(family)
    if family not in CONFIG_MAPPING or name is None:
        return f"transformers {transformers.__version__} has no {family} to compare with"
    try:
        with _silent(), torch.device("meta"):
            model = getattr(transformers, name)(CONFIG_MAPPING[family].from_dict(values))
    except Exception as error:  # of code that is not ours, on values that may be anything
        return f"transformers {transformers.__version__} builds no {name} of them: {type(error).__name__}"
    return sum(parameter.numel() for parameter in model.parameters()) or f"{name} has no parameters"


def _text_part(document: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The fields of the language model, and the classes of the whole."""
    nested = next((document[name] for name in TEXT_PARTS if isinstance(document.get(name), dict)), None)
    return document if nested is None else nested, document.get("architectures") or []


def _with_words(spec: ModelSpec, words: str) -> ModelSpec:
    return replace(spec, unpriced=", ".join(filter(None, [spec.unpriced, words])))


@contextmanager
def _silent() -> Iterator[None]:
    """Without the log of transformers, which speaks of weights and attention that are not meant here."""
    logger = logging.getLogger("transformers")
    before, logger.disabled = logger.disabled, True
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.disabled = before
        logger.setLevel(level)
