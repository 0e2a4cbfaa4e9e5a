"""The request of an analysis."""

from dataclasses import dataclass
from typing import Literal

from lengthwise.config.choices import Dtype
from lengthwise.core.errors import InputError

Kind = Literal["length", "loss", "function"]

LENGTH = "length"
_LOSS = "loss="
MAX_TOKENS = 16_384
"""Of a pack, where the request does not say."""


@dataclass(frozen=True, kw_only=True)
class AnalysisRequest:
    """One metric of the sequences of an index."""

    kind: Kind
    target: str = ""
    """Of ``loss``: the folder of the model; of ``function``: MODULE:FUNCTION."""
    name: str
    max_length: int | None = None
    """Most tokens of a sequence that the model is given; none: all."""
    truncate: bool = False
    """Whether the first ``max_length`` tokens stand for a longer sequence; else it is refused."""
    max_tokens: int = MAX_TOKENS
    """Most tokens of a pack; a longer sequence is a pack of its own."""
    dtype: Dtype = "float32"
    """What the model computes in."""

    def __post_init__(self) -> None:
        if self.name == LENGTH and self.kind != LENGTH:
            raise InputError("a metric called 'length' would be taken for the lengths; choose another --name")
        if self.kind != "loss" and (self.max_length is not None or self.truncate):
            raise InputError(
                f"--max-length and --truncate say what a model is given; metric {self.metric} has no model: leave them "
                "out"
            )
        if self.truncate and self.max_length is None:
            raise InputError("--truncate cuts sequences at --max-length: give that too")

    @property
    def metric(self) -> str:
        """The metric as it was asked for, in the words of the command line."""
        return {"length": LENGTH, "loss": _LOSS + self.target, "function": self.target}[self.kind]


def parse_metric(text: str) -> tuple[Kind, str, str]:
    """Kind, target and usual name of ``length``, ``loss=FOLDER`` or ``MODULE:FUNCTION``.

    Raises:
        InputError: it is none of these.
    """
    if text == LENGTH:
        return "length", "", LENGTH
    if text.startswith(_LOSS) and text != _LOSS:
        return "loss", text.removeprefix(_LOSS), "loss"
    module, colon, function = text.partition(":")
    if colon and module and function:
        return "function", text, function.rpartition(".")[2]
    raise InputError(f"no metric {text!r}; known are length, loss=FOLDER of a model, and MODULE:FUNCTION of your own")
