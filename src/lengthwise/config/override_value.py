"""The value that ``section.key=value`` gives to a setting."""

from typing import Any

from lengthwise.core.read_yaml import parse_yaml

_NULL = "null"
_QUOTES = "'\""


def override_value(kind: Any, text: str) -> Any:
    """What an override says of a setting of type ``kind``: ``text`` itself where that is text, else its YAML value.

    Text in quotes is what these hold.

    Raises:
        ValueError: it is a list or mapping that cannot be read.
    """
    is_quoted = len(text) > 1 and text[0] in _QUOTES and text[-1] == text[0]
    if not text or (kind in (str, str | None) and text != _NULL and not is_quoted):
        return text
    if is_quoted or text[0] in "[{":
        return parse_yaml(text)
    if text[0] in "#&*!|>" or " #" in text:  # to YAML, a comment or what says something of a value
        return text
    try:
        return parse_yaml(text)
    except ValueError:
        return text
