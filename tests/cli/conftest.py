import sys
from collections.abc import Callable

import pytest

from lengthwise.cli.main import main

Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def cli(monkeypatch, capsys) -> Cli:
    """Run ``lengthwise`` in this process: (exit code, stdout, stderr)."""

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["lengthwise", *map(str, arguments)])
        capsys.readouterr()
        try:
            main()
        except SystemExit as leave:
            code = leave.code if isinstance(leave.code, int) else int(bool(leave.code))
        else:
            code = 0
        written = capsys.readouterr()
        return code, written.out, written.err

    return run
