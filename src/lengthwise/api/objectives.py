"""What a model learns from: its objective by its class, and what its forward takes of items."""

from inspect import Parameter, signature
from typing import Any

from torch import nn

from lengthwise.api.columns import Expected
from lengthwise.api.options import Options
from lengthwise.core.batch import EVERY_TOKEN, MASKED, NEXT_TOKEN
from lengthwise.core.errors import InputError

_OF_WHOLE_SEQUENCES = (
    "SequenceClassification",
    "MultipleChoice",
    "QuestionAnswering",
    "NextSentencePrediction",
    "PreTraining",
    "DoubleHeadsModel",
    "ImageClassification",
    "AudioClassification",
    "VideoClassification",
    "CTC",
)
"""Ends of names of classes of transformers whose loss is not one of each token."""


def base_model(model: nn.Module) -> nn.Module:
    """The model that adapters of peft were put into, or the model itself."""
    inner = getattr(model, "get_base_model", None)
    return inner() if hasattr(model, "peft_config") and callable(inner) else model


def expected_columns(model: nn.Module, options: Options) -> Expected:
    """What items are to hold for ``model`` to learn what it is asked to.

    Raises:
        InputError: its class learns from something else than tokens.
    """
    inner = base_model(model)
    name = type(inner).__name__
    is_hugging_face = _is_hugging_face(inner)
    if is_hugging_face and options.loss is None and any(part in name for part in _OF_WHOLE_SEQUENCES):
        raise InputError(
            f"{name} has one label for each sequence or picture, and several sequences share one forward here; use its "
            "...ForTokenClassification with the label at one token of each sequence and -100 elsewhere, which learns "
            "the same"
        )
    classifies = is_hugging_face and name.endswith("ForTokenClassification")
    objective = options.objective or (
        MASKED if name.endswith("ForMaskedLM") else EVERY_TOKEN if classifies else NEXT_TOKEN
    )
    if classifies and objective != EVERY_TOKEN:
        raise InputError(f"objective={objective!r}: {name} has a label for each token; leave objective out")
    return Expected(
        objective=objective,
        arguments=forward_arguments(inner),
        label_limit=_label_limit(inner, classifies=classifies) if is_hugging_face else None,
        ignore_index=options.ignore_index,
        slot_tokens=options.slot_tokens,
        needs_labels=classifies,
        makes_inputs=options.inputs is not None,
    )


def forward_arguments(model: nn.Module) -> frozenset[str]:
    """Names of the parameters of a model's forward."""
    try:
        parameters = signature(model.forward).parameters.values()
    except (TypeError, ValueError):
        return frozenset()
    return frozenset(p.name for p in parameters if p.kind not in (Parameter.VAR_KEYWORD, Parameter.VAR_POSITIONAL))


def _is_hugging_face(model: nn.Module) -> bool:
    return hasattr(model, "set_attn_implementation") and hasattr(model, "config")


def _label_limit(model: Any, *, classifies: bool) -> int | None:
    """Labels are below this number."""
    if classifies:
        return int(model.config.num_labels)
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    rows = getattr(head, "out_features", None)
    if rows is None and head is not None and getattr(head, "weight", None) is not None:
        rows = head.weight.shape[0]
    return None if rows is None else int(rows)
