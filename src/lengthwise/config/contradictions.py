"""Settings that contradict one another: refused where a configuration is read, before anything is opened."""

from typing import Any

from pydantic import ValidationInfo
from pydantic_core import PydanticCustomError

CONTRADICTION = "contradiction"
"""The type of such errors, whose messages name all settings that they are about."""
ONE_OF_THEM = "leave one of them out"
OR_NULL = f"{ONE_OF_THEM}, or set it to null where a file has it"


def contradiction(text: str) -> PydanticCustomError:
    """An error for a validator to raise, whose message is ``text``."""
    return PydanticCustomError(CONTRADICTION, "{text}", {"text": text})


def check_alone(section: str, value: Any, info: ValidationInfo, *, beside: str, way_out: str = OR_NULL) -> None:
    """Raise if a setting that is validated is set, and so is ``beside`` of the same section, which comes before it."""
    if is_set(value) and is_set(other := info.data.get(beside)):
        raise contradiction(
            f"{section}.{beside}={other} and {section}.{info.field_name}={value} are both set; {way_out}"
        )


def is_set(value: Any) -> bool:
    """Whether a setting says something: none, an empty text and an empty list do not."""
    return value is not None and value != "" and value != ()
