"""The value that ``section.key=value`` gives to a setting."""

from typing import Any

from lengthwise.core.read_yaml import parse_yaml

_NULL = "null"


def override_value(kind: Any, text: str) -> Any:
    """What an override says of a setting of type ``kind``: ``text`` itself where that is text, else its YAML value.

    Raises:
        ValueError: it is a list or mapping that cannot be read.
    """
    if not text or (kind in (str, str | None) and text != _NULL):
        return text
    if text[0] in "[{":
        return parse_yaml(text)
    if text[0] in "#&*!|>" or " #" in text:  # to YAML, a comment or what says something of a value
        return text
    try:
        return parse_yaml(text)
    except ValueError:
        return text
