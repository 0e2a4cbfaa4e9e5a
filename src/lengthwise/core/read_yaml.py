"""Read YAML that somebody else wrote: plain values only, each key once, without aliases or tags, not deeply nested."""

import re
from typing import Any

import yaml

MAX_DEPTH = 16
"""Levels of nesting; a configuration has four."""


class _PlainLoader(yaml.SafeLoader):
    """YAML without the parts by which a small file becomes a large or a surprising value."""

    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Compose a node, unless it is an alias, has a tag or lies too deep."""
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent):
            raise _refusal(f"the alias *{event.anchor} is not allowed; write the value again", event)
        if getattr(event, "tag", None) is not None:
            raise _refusal(f"the tag {event.tag} is not allowed; write the plain value", event)
        if self.depth >= MAX_DEPTH:
            raise _refusal(f"values are nested more than {MAX_DEPTH} levels deep", event)
        self.depth += 1
        try:
            return super().compose_node(parent, index)
        finally:
            self.depth -= 1

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        """Construct a value; what its type refuses is named with its line."""
        try:
            return super().construct_object(node, deep=deep)
        except (ValueError, OverflowError, KeyError, TypeError, AttributeError):
            raise _refusal("a value cannot be read; put text in quotes", node) from None

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        """Construct a mapping whose keys are text, each there once."""
        first_line: dict[str, int] = {}
        for key_node, _ in node.value:
            key, line = getattr(key_node, "value", None), key_node.start_mark.line + 1
            if not isinstance(key, str):
                raise _refusal("a key is not text", key_node)
            if key == "<<":
                raise _refusal("merging mappings with << is not allowed; write the values again", key_node)
            if key in first_line:
                raise _refusal(f"the key {key!r} is on line {first_line[key]} and again on line {line}", key_node)
            first_line[key] = line
        return super().construct_mapping(node, deep=deep)


_INT, _FLOAT, _TIMESTAMP = (f"tag:yaml.org,2002:{kind}" for kind in ("int", "float", "timestamp"))
# Dates, 1:30 (90 to YAML 1.1) and 010 (8) are text: no setting is a date, and nobody counts in sixties or octal here.
_PlainLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in (_INT, _FLOAT, _TIMESTAMP)]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_PlainLoader.add_implicit_resolver(_INT, re.compile(r"^[-+]?(?:0|[1-9][0-9_]*|0x[0-9a-fA-F_]+)$"), list("-+0123456789"))
_PlainLoader.add_implicit_resolver(
    _FLOAT,
    re.compile(
        r"^[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?$|^[-+]?\.(?:inf|Inf|INF)$|^\.(?:nan|NaN|NAN)$"
    ),
    list("-+0123456789."),
)


def parse_yaml(text: str) -> Any:
    """The value that YAML ``text`` spells: numbers, text, lists and mappings.

    Raises:
        ValueError: it is not YAML, or uses what is refused here; the message names the line.
    """
    try:
        return _PlainLoader(text).get_single_data()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark is not None else ""
        raise ValueError(f"{where}{error.problem or error.context}") from None
    except yaml.reader.ReaderError as error:
        raise ValueError(
            f"character {error.position + 1:,} is {error.character!a}, which YAML does not allow"
        ) from None
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(str(error)) from None


def _refusal(problem: str, where: Any) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=where.start_mark)
