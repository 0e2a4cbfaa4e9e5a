import shutil
import sys
from collections.abc import Callable

import pytest

from lengthwise.cli.main import main
from tests.cli.bad_inputs import Case, check, good_inputs

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


@pytest.fixture
def refuse(cli, tmp_path, tmp_path_factory, monkeypatch) -> Callable[[Case], None]:
    """Run a case of bad input on a copy of good ones, and assert that it is refused as it must be."""

    def run(case: Case) -> None:
        shutil.copytree(good_inputs(tmp_path_factory.getbasetemp()), tmp_path / "inputs")
        check(case, cli, tmp_path / "inputs", monkeypatch)

    return run
