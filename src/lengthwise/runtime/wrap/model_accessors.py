"""What a model says of itself by methods and properties that its class may leave to others, and that raise then.

transformers gives every model ``get_input_embeddings``, which raises for those that embed no ids of a table (CANINE,
models of sound); a wrapper may pass such a question on to a model that does not answer it.
"""

from collections.abc import Callable
from typing import Any

from torch import nn


def input_embeddings(model: nn.Module) -> nn.Module | None:
    """The module that embeds token ids; None where the model names none."""
    return _module_of(model, "get_input_embeddings")


def output_embeddings(model: nn.Module) -> nn.Module | None:
    """The module that makes logits of hidden states; None where the model names none."""
    return _module_of(model, "get_output_embeddings")


def base_model(model: nn.Module) -> nn.Module:
    """The model that adapters of peft were put into, or the model itself."""
    inner = getattr(model, "get_base_model", None)
    return inner() if hasattr(model, "peft_config") and callable(inner) else model


def is_hugging_face(model: nn.Module) -> bool:
    """Whether a model is one of transformers."""
    return hasattr(model, "set_attn_implementation") and hasattr(model, "config")


def _module_of(model: nn.Module, method: str) -> nn.Module | None:
    find = readable(model, method)
    module = answer(find) if callable(find) else None
    return module if isinstance(module, nn.Module) else None


def readable(thing: Any, name: str, default: Any = None) -> Any:
    """An attribute, or ``default`` where it is missing or is a property that raises."""
    return answer(lambda: getattr(thing, name), default)


def answer(question: Callable[[], Any], default: Any = None) -> Any:
    """What a model's code returns, or ``default`` where it raises: then it has no answer."""
    try:
        return question()
    except Exception:  # whatever other people's code raises for what it does not say
        return default
