"""`lengthwise config`: print a configuration to start from, or check one."""

import json
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import typer

from lengthwise.cli.launch import split_arguments
from lengthwise.config.run_config import Config, load
from lengthwise.core.device_spec import DEVICES
from lengthwise.core.specs import MODELS
from lengthwise.session.console import emit_json, write_out


def run(
    config: Annotated[Path | None, typer.Argument(help="YAML to check and resolve; none: the defaults")] = None,
    overrides: Annotated[list[str] | None, typer.Argument(help="section.key=value ...")] = None,
    presets: Annotated[bool, typer.Option("--presets", help="list model and device presets instead")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON document on stdout")] = False,
) -> None:
    """Print every setting with its meaning, resolved and checked."""
    if presets:
        emit_json({"models": sorted(MODELS), "devices": sorted(DEVICES)})
        return
    resolved = load(*split_arguments(config, overrides))
    if as_json:
        emit_json(resolved.model_dump(mode="json"))
    else:
        write_out("\n".join(_lines(resolved, Config, "")) + "\n")


def _lines(values: Any, section: Any, indent: str) -> list[str]:
    """YAML with each setting's description as a comment."""
    lines = []
    for name, field in section.model_fields.items():
        if hasattr(field.annotation, "model_fields"):
            title = (field.annotation.__doc__ or "").strip()
            lines += ["", f"{name}:  # {title}", *_lines(getattr(values, name), field.annotation, indent + "  ")]
        else:
            plain = values.model_dump(mode="json", include={name})[name]
            comment = "; ".join(filter(None, (_choices(field.annotation), " ".join((field.description or "").split()))))
            lines.append(f"{indent}{name}: {json.dumps(plain)}" + (f"  # {comment}" if comment else ""))
    return lines


def _choices(kind: Any) -> str:
    """The words that a setting may be."""
    words = [word for part in (kind, *get_args(kind)) if get_origin(part) is Literal for word in get_args(part) if word]
    return " | ".join([*words, "MODULE:FUNCTION"] if str in get_args(kind) and words else words)
