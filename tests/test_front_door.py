"""``import lengthwise``: its public names, the types that mypy sees, and one sentence where a package is missing."""

import subprocess
import sys

import pytest
from mypy import api

import lengthwise

RIGHT = """
import lengthwise as lw
from torch import nn
from lengthwise.config.optimizer_settings import OptimizerSettings

def train(model: nn.Module, rows: list[list[int]]) -> None:
    run = lw.prepare(model, rows, policy="static", lr=1e-4, sequences_per_step=8, optimizer=OptimizerSettings())
    for step in run.steps():
        for micro_batch in step:
            step.backward(model(**micro_batch.inputs).loss)
        step.update()
    plan = lw.plan([1, 2, 3], model="llama-7b", cluster="8xH100-80GB")
"""
CONFIG = """
[mypy]
follow_imports = silent
[mypy-torch.*,numpy.*,scipy.*,pydantic.*,transformers.*,accelerate.*,typer.*,rich.*,yaml.*,jinja2.*,pyarrow.*]
follow_imports = skip
"""
"""Other packages are left out, which takes seconds instead of minutes."""
WRONG = {
    "lw.prepare(model, rows, sequences_per_stp=8)": 'Unexpected keyword argument "sequences_per_stp"',
    "lw.prepare(model, rows, sequences_per_step='8')": 'Argument "sequences_per_step" to "prepare" has incompatible',
    "lw.prepare(model, rows, over_length='cut')": 'Argument "over_length" to "prepare" has incompatible type',
    "lw.plan([1], model='llama-7b', cluster='8xH100-80GB', polcy='auto')": 'Unexpected keyword argument "polcy"',
    "lw.no_such_name": 'Module has no attribute "no_such_name"',
}


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """What mypy says of the right script, with a line more for each mistake."""
    folder = tmp_path_factory.mktemp("types")
    script, config = folder / "script.py", folder / "mypy.ini"
    config.write_text(CONFIG)
    script.write_text(RIGHT + "".join(f"    {line}\n" for line in WRONG))
    out, err, _ = api.run([f"--config-file={config}", f"--cache-dir={folder}", str(script)])
    assert not err
    return out.splitlines()


@pytest.mark.deep
def test_mypy_takes_what_is_right_and_rejects_wrong_names_and_types(said):
    first = len(RIGHT.splitlines()) + 1
    lines = {int(line.split(":")[1]): line for line in said if ": error:" in line}
    assert sorted(lines) == list(range(first, first + len(WRONG))), said
    for number, message in enumerate(WRONG.values(), first):
        assert message in lines[number]


def test_dir_lists_the_public_names():
    assert {*lengthwise.__all__} <= {*dir(lengthwise)}


def without_torch(code):
    return subprocess.run(
        [sys.executable, "-c", f"import tests.no_torch, lengthwise\n{code}"], capture_output=True, text=True
    )


def test_without_torch_a_name_says_what_to_install():
    names = (
        "prepare",
        "Trainer",
        "TrainerCallback",
        "BatchSampler",
        "pad",
        "compile",
        "recompute",
        "ScaledLR",
        "Run",
        "Step",
    )
    code = (
        f"for name in {names}:\n    try: getattr(lengthwise, name)\n    except ImportError as error: print(error)\n"
        f"assert not {{*dir(lengthwise)}} & {{*{names}}} and 'compare' in dir(lengthwise)"
    )
    done, need = without_torch(code), "needs torch, which is not installed: pip install 'lengthwise[train]'"
    assert done.stdout.splitlines() == [f"lengthwise.{name} {need}" for name in names], done.stderr


def test_help_works_without_torch():
    done = without_torch("help(lengthwise)")
    assert done.returncode == 0 and "compare(" in done.stdout, done.stderr
