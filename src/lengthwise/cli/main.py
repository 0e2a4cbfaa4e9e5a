"""The command line: one file per command, imported only when called, so that --help answers at once."""

import os
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import wraps
from importlib import import_module
from typing import Any, NamedTuple

import typer
import typer.core
import typer.main

from lengthwise.cli.failures import CommandFailed, explain
from lengthwise.cli.launch import is_rank, speaks_for_all
from lengthwise.cli.rank_errors import SAME_ERROR_WITHIN_S, is_first, note_for_torchrun
from lengthwise.cli.signals import Terminated, ended_by_signals, stoppable_start
from lengthwise.core.atomic_write import reason
from lengthwise.core.errors import InputError, LengthwiseError, Preempted
from lengthwise.session.console import discard_stdout, emit_json, prepare_streams, print_error, write_out

HELP = {"help_option_names": ["--help", "-h"]}
"""What asks for help, of all commands."""
USAGE = 2
"""The exit code of a command line that cannot be read."""

COMMANDS = {
    "demo": "Index real text, profile, train under three policies, and write the report.",
    "index": "Turn text, code, FASTA, Parquet or lengths into an index.",
    "stats": "Show what the lengths of an index cost: padding, imbalance, what max_length would cut.",
    "analyze": "Compute a metric of every sequence, such as a model's loss, to order training by.",
    "profile": "Measure a model on this device and fit its cost.",
    "memory": "Show the longest sequence each scheme holds, and the cheapest scheme for a length.",
    "plan": "Plan the steps of a run: who computes what, how long, how far from optimal.",
    "simulate": "Execute plans in virtual time: step time, idle share, trace.",
    "dryrun": "Run any rank's training step without a GPU: bytes, kernels, collectives, synchronisations.",
    "compare": "Compare all policies on lengths, a model and a cluster: a table, and a page to show around.",
    "train": "Train a model under torchrun.",
    "report": "Write one HTML page and a trace of a run.",
    "export": "Write a checkpoint as Hugging Face safetensors.",
    "config": "Print, check or explain the configuration.",
}


class LazyGroup(typer.core.TyperGroup):
    """Lists commands from a table; imports a command's module, and its ``run``, only when it is called."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Names of the commands, in the order of the table."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command of that name; None if there is none."""
        if cmd_name not in COMMANDS:
            return None
        try:
            run = import_module(f"lengthwise.cli.commands.{cmd_name}").run
        except ModuleNotFoundError as error:  # such as torch, which is an extra
            raise explain(error) from None
        command = typer.Typer(add_completion=False, rich_markup_mode=None)
        command.command(name=cmd_name, help=COMMANDS[cmd_name], context_settings=HELP)(_guarded(run))
        return typer.main.get_command(command)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command that ``args`` begins with; one that does not exist is refused with the nearest name."""
        if not ctx.resilient_parsing and args[0] not in COMMANDS:
            from lengthwise.core.wording import nearest

            ctx.fail(f"no command {args[0][:100]!a}; {nearest(args[0], COMMANDS)}")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Call the command; where its command line is wrong, say what was meant."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:  # while the command is imported
            raise explain(error) from None
        except typer.BadParameter as error:
            error.message = _with_hint(error)
            raise
        except Exception as error:
            if type(error).__name__ == "NoSuchOption":  # typer makes no name of it public
                _add_way_out(error)
            raise

    def shell_complete(self, ctx: Any, incomplete: str) -> Any:
        """Complete the name of a command from the table, so that pressing Tab imports none of them."""
        if incomplete.startswith("-"):
            return super().shell_complete(ctx, incomplete)
        return [Completion(name, text) for name, text in COMMANDS.items() if name.startswith(incomplete)]

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the table of commands, without importing any."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


class Completion(NamedTuple):
    """One word that the shell may complete."""

    value: str
    help: str
    type: str = "plain"


app = typer.Typer(cls=LazyGroup, context_settings=HELP, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.callback(invoke_without_command=True, no_args_is_help=True)
def _root(version: bool = typer.Option(False, "--version", help="Print the version and leave.")) -> None:
    """Train Transformers on sequences of any length at the speed the lengths allow."""
    if version:
        from lengthwise import __version__

        typer.echo(__version__)
        raise typer.Exit


def main() -> None:
    """Run a command; every way it can end becomes at most one message and an exit code (0 1 2 3 4 75 129 130 143)."""
    prepare_streams()
    try:
        with _signals_of(sys.argv[1:2]):
            app()
    except Terminated as stopped:  # before the command was called, or after
        print_error(str(stopped))
        sys.exit(stopped.exit_code)
    except Preempted as stopped:  # before the command was called
        if speaks_for_all():
            if "--json" in sys.argv:
                _emit_error(explain(stopped).to_json())
            print_error(str(stopped))
        sys.exit(stopped.exit_code)
    except CommandFailed as failed:
        if "--json" in sys.argv:
            _emit_error(failed.to_json())
        _drop_unwritten()
        if failed.exit_code == Preempted.exit_code and not speaks_for_all():
            sys.exit(failed.exit_code)
        note_for_torchrun(failed.message)
        if not is_first():
            time.sleep(SAME_ERROR_WITHIN_S)  # torchrun ends this rank meanwhile if the first failed too
        print_error(failed.message)
        sys.exit(failed.exit_code)
    except SystemExit as leave:
        if leave.code == USAGE and "--json" in sys.argv:
            _emit_error({"error": _usage_error(leave), "exit_code": USAGE})
        raise
    except BrokenPipeError:
        discard_stdout()
        sys.exit(0)
    except OSError as error:  # of stdout, to which the parser of the command line writes help
        discard_stdout()
        print_error(f"stdout cannot be written ({reason(error)})")
        sys.exit(LengthwiseError.exit_code)


def _emit_error(document: dict[str, Any]) -> None:
    """Print the document of a command that failed, unless stdout cannot be written, which may be why it did."""
    with suppress(LengthwiseError, BrokenPipeError):
        emit_json(document)


def _drop_unwritten() -> None:
    """Throw away what a command that failed could not write to stdout: python would fail for it as it ends."""
    with suppress(LengthwiseError, BrokenPipeError):
        write_out("")


def _signals_of(command: list[str]) -> AbstractContextManager[None]:
    """What SIGTERM and SIGHUP do while a command begins, and while those run that handle no signals themselves."""
    if command == ["train"]:
        return stoppable_start()
    return nullcontext() if is_rank() else ended_by_signals()


def _usage_error(leave: SystemExit) -> str:
    """What the parser of the command line said on stderr before it left."""
    format_message = getattr(leave.__context__, "format_message", None)
    return "wrong usage, explained on stderr" if format_message is None else str(format_message())


def _with_hint(error: typer.BadParameter) -> str:
    """The message of a wrong option with the choice that is nearest, or of a missing --device with the presets."""
    from lengthwise.core.wording import with_nearest

    if "--device" in getattr(error.param, "opts", ()) and type(error).__name__ == "MissingParameter":
        from lengthwise.core.device_spec import DEVICES

        return f"Presets: {', '.join(DEVICES)}; or give a YAML file of a device"
    return with_nearest(error.message, error.message.partition("'")[2].partition("'")[0])


def _add_way_out(error: Any) -> None:
    """Say in an error about an unknown option how its command, where it reads a configuration, takes settings."""
    takes_settings = any(parameter.name == "overrides" for parameter in error.ctx.command.params)
    if takes_settings and not error.possibilities:
        error.message += (
            f". lengthwise {error.ctx.info_name} reads settings as section.key=value, such as data.index=FOLDER; "
            "lengths without a configuration are planned by: lengthwise compare --lengths"
        )


def _check_folder() -> None:
    """Raise ``InputError`` if the folder in which this was started is gone: torch ends the process for it."""
    try:
        os.getcwd()
    except FileNotFoundError:
        raise InputError("the current folder was removed; change to one that is there, such as with: cd") from None


def _guarded(run: Callable[..., None]) -> Callable[..., None]:
    """Wrap a command so that its exceptions are explained, before the parser of the command line sees them."""

    @wraps(run)
    def run_guarded(*arguments: Any, **options: Any) -> None:
        try:
            _check_folder()
            run(*arguments, **options)
            write_out("")
        except BrokenPipeError:  # such as `lengthwise config | head -1`: the reader has what it wants
            discard_stdout()
            raise SystemExit(0) from None
        except (Exception, KeyboardInterrupt, Terminated) as error:
            if type(error).__module__.startswith(("typer", "click")):  # the parser's own, such as typer.Exit
                raise
            raise explain(error) from error

    return run_guarded
