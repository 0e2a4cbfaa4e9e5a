import json
import shutil
import sys
from collections.abc import Callable

import pytest

from lengthwise.cli.json_documents import DOCUMENTS, FailureDocument
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
        if "--json" in arguments and written.out.startswith("{"):
            check_document(str(arguments[0]), json.loads(written.out), failed=code != 0)
        return code, written.out, written.err

    return run


def check_document(command: str, document: dict, *, failed: bool = False) -> None:
    """What any test has a command print under ``--json`` is as its schema says."""
    kinds = (FailureDocument,) if failed else DOCUMENTS[command]
    kind = next((kind for kind in kinds if {*kind.model_fields} <= {*document}), kinds[0])
    kind.model_validate(document)


@pytest.fixture
def refuse(cli, tmp_path, tmp_path_factory, monkeypatch) -> Callable[[Case], None]:
    """Run a case of bad input on a copy of good ones, and assert that it is refused as it must be."""

    def run(case: Case) -> None:
        shutil.copytree(good_inputs(tmp_path_factory.getbasetemp()), tmp_path / "inputs")
        check(case, cli, tmp_path / "inputs", monkeypatch)

    return run
