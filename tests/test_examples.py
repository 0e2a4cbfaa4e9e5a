"""Every example runs, and stays short enough to read."""

import re
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from tests.warm import Command

NEEDS_TRL = pytest.mark.skipif(find_spec("trl") is None, reason="trl is not installed")
EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("[0-9]*.py"))
ON_RANKS = (
    "04_transformers",
    pytest.param("04_transformers", id="04_transformers, compared", marks=pytest.mark.deep),
    pytest.param("03_plain_gpt", marks=pytest.mark.deep),
    pytest.param("05_video", marks=pytest.mark.deep),
    pytest.param("06_grpo", marks=pytest.mark.deep),
    pytest.param("07_trl_dpo", marks=[pytest.mark.deep, NEEDS_TRL]),
    pytest.param("08_trl_grpo", marks=[pytest.mark.deep, NEEDS_TRL]),
)
"""Those that torchrun starts; python does as well."""
ALONE = [path for path in EXAMPLES if path.stem != "04_transformers"]
UNCHECKED = "from tests.runtime.harness import compare_where_asked\ncompare_where_asked()\n"
"""Leaves out the comparison before a run, which other examples have."""
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2")


FEWER = {
    "03_plain_gpt": ("numbers.geometric(0.04, 300)", "numbers.geometric(0.04, 80)"),
    "06_grpo": ("for iteration in range(8):", "for iteration in range(2):"),
}
"""Lines of examples that go round as often as it takes to learn something, and ones that go round all the same."""


def run(path, home, *before):
    out = home / "out"
    variables = {"HOME": str(home), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    code = Command(*before, path, out=out, variables=variables).wait(240)
    assert code == 0, out.read_text()
    return out.read_text()


@pytest.mark.parametrize(
    "path",
    # Four ranks of one example start from nothing, which takes longest.
    [
        pytest.param(
            path,
            id=path.stem,
            marks=[*[pytest.mark.deep] * path.stem.startswith("02"), *[NEEDS_TRL] * ("_trl_" in path.stem)],
        )
        for path in ALONE
    ],
)
def test_example_runs(path, tmp_path):
    if path.stem in FEWER:
        text, (line, shorter) = path.read_text(), FEWER[path.stem]
        assert line in text
        path = tmp_path / path.name
        path.write_text(text.replace(line, shorter))
    assert run(path, tmp_path)


@pytest.mark.deep
@pytest.mark.parametrize("name", ON_RANKS)
def test_example_of_any_model_learns_on_two_ranks(name, tmp_path, request):
    path = next(path for path in EXAMPLES if path.stem == name)
    if request.config.getoption("markexpr") != "deep":
        (tmp_path / path.name).write_text(UNCHECKED + path.read_text())
        path = tmp_path / path.name
    told = run(path, tmp_path, *TORCHRUN)
    if "reward " in told:
        rewards = [float(value) for value in re.findall(r"reward ([\d.]+)", told)]
        assert len(rewards) == 8 and np.mean(rewards[-3:]) > np.mean(rewards[:3])
        return
    losses = [float(value) for value in re.findall(r"loss (\d+\.\d+)", told)]
    assert len(losses) >= 5 and losses[-1] < losses[0]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_is_short(path):
    text = path.read_text()
    assert len(text.splitlines()) < 60
    assert text.count("# +") <= 10, "lines that lengthwise adds to a script"
