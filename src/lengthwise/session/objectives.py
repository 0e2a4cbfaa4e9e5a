"""What a model learns from: its objective by its class, and what its forward takes of items."""

from inspect import Parameter, signature
from typing import Any

from torch import nn

from lengthwise.config.prepare_options import PrepareOptions
from lengthwise.core.batch import EVERY_TOKEN, MASKED, NEXT_TOKEN
from lengthwise.core.errors import InputError
from lengthwise.runtime.wrap.model_accessors import base_model, is_hugging_face, output_embeddings
from lengthwise.runtime.wrap.sequence_labels import classifies_sequences
from lengthwise.session.check_sample import special_tokens
from lengthwise.session.item_values import ExpectedColumns

_OF_TOKENS = ("ForTokenClassification", "ElectraForPreTraining", "FunnelForPreTraining")
"""Ends of names of classes of transformers that classify each token."""
_IN_TWO = ("ForNextSentencePrediction", "ElectraForPreTraining", "FunnelForPreTraining")
"""Ends of names of classes of transformers whose labels are 0 and 1, whatever the config says."""
_OF_MORE = (
    "ForMultipleChoice",
    "ForQuestionAnswering",
    "ForQuestionAnsweringSimple",
    "ForPreTraining",
    "DoubleHeadsModel",
    "ForImageClassification",
    "ForAudioClassification",
    "ForVideoClassification",
    "ForCTC",
)
"""Ends of names of other classes of transformers, whose loss is one neither of tokens nor of sequences."""


def labels_sequences(model: nn.Module, options: PrepareOptions) -> bool:
    """Whether a model takes one label for each sequence; it is computed sequence by sequence then."""
    makes_all = options.loss is not None and options.inputs is not None
    return not makes_all and classifies_sequences(model)


def expected_columns(model: nn.Module, options: PrepareOptions) -> ExpectedColumns:
    """What items are to hold for ``model`` to learn what it is asked to.

    Raises:
        InputError: its class learns from something else than tokens.
    """
    inner = base_model(model)
    name = type(inner).__name__
    of_transformers = is_hugging_face(inner)
    of_sequences = labels_sequences(model, options)
    if of_sequences:
        _check_classifies_sequences(inner, options)
    of_tokens = of_transformers and name.endswith(_OF_TOKENS)
    classifies = of_sequences or of_tokens
    is_said = any(said is not None for said in (options.objective, options.inputs, options.loss))
    if of_transformers and not (of_tokens or is_said) and name.endswith(_OF_MORE):
        raise InputError(
            f"{name} has neither one label for each token nor one for each sequence, which is what items can hold; use "
            "its ...ForTokenClassification or ...ForSequenceClassification, say objective='every-token' if its labels= "
            "are those of tokens, or say how it is called and how its loss is made with inputs= and loss="
        )
    objective = options.objective or (
        MASKED if name.endswith("ForMaskedLM") else EVERY_TOKEN if classifies else NEXT_TOKEN
    )
    if classifies and objective != EVERY_TOKEN:
        what = "sequence" if of_sequences else "token"
        raise InputError(f"objective={objective!r}: {name} has a label for each {what}; leave objective out")
    return ExpectedColumns(
        objective=objective,
        arguments=forward_arguments(inner),
        label_limit=_label_limit(inner, classifies=classifies) if of_transformers else None,
        ignore_index=options.ignore_index,
        slot_tokens=options.slot_tokens,
        needs_labels=classifies,
        labels_sequences=of_sequences,
        makes_inputs=options.inputs is not None,
        loss_columns=options.loss_columns,
        shares_prefixes=options.share_prefixes,
        special_tokens=special_tokens(inner),
    )


def _check_classifies_sequences(model: Any, options: PrepareOptions) -> None:
    """Raise ``InputError`` unless each sequence has one class, and stays whole."""
    name, problem = type(model).__name__, getattr(model.config, "problem_type", None)
    if problem not in (None, "single_label_classification") or int(model.config.num_labels) < 2:
        raise InputError(
            f"{name} with num_labels={model.config.num_labels} and problem_type={problem!r} predicts numbers or "
            "several classes of a sequence, and items can hold one class. Let inputs= make its labels, as "
            "micro_batch.column_by_sequence(name) of loss_columns=[name], with loss=lambda output, micro_batch: "
            "output.loss; with step.backward(loss, mean_over='units') each sequence weighs the same"
        )
    if options.over_length == "split":
        raise InputError(f"over_length='split': {name} has one label for a whole sequence; truncate or drop")


def forward_arguments(model: nn.Module) -> frozenset[str]:
    """Names of the parameters of a model's forward."""
    try:
        parameters = signature(model.forward).parameters.values()
    except (TypeError, ValueError):
        return frozenset()
    return frozenset(p.name for p in parameters if p.kind not in (Parameter.VAR_KEYWORD, Parameter.VAR_POSITIONAL))


def _label_limit(model: Any, *, classifies: bool) -> int | None:
    """Labels are below this number."""
    if type(model).__name__.endswith(_IN_TWO):
        return 2
    if classifies:
        return int(model.config.num_labels)
    head = output_embeddings(model)
    rows, shape = getattr(head, "out_features", None), tuple(getattr(getattr(head, "weight", None), "shape", ()))
    if len(shape) == 2 and (rows is None or (rows != shape[0] and rows == shape[1])):
        rows = shape[0]  # of a tied embedding, of which peft's wrapper says that it puts out hidden states
    return None if rows is None else int(rows)
