"""Every block of Python in README and docs runs, in the surroundings that its page speaks of; so do notebooks.

A block that is not listed here runs by itself, so a new one cannot escape.
"""

import ast
import importlib
import inspect
import json
import re
import sys
import textwrap

import numpy as np
import pytest

import lengthwise
from lengthwise.index.build import build_index
from lengthwise.index.settings import IndexSettings
from tests.docs.blocks import BLOCKS, NOTEBOOKS, cells, in_language
from tests.docs.test_commands import named
from tests.docs.user_files import write_chats, write_model
from tests.report.fake_run import make_run
from tests.sim.plans import lane, make_plan
from tests.warm import Command

PYTHON = in_language("python")
MODEL = """
import numpy as np, torch, lengthwise as lw
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM
torch.manual_seed(0)
model = AutoModelForCausalLM.from_pretrained("my-model")
numbers = np.random.default_rng(0)
rows = corpus = [torch.from_numpy(numbers.integers(0, 256, size)) for size in numbers.integers(3, 40, 24)]
lengths = np.array([len(row) for row in rows])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""
IN_A_STEP = """
run = lw.prepare(model, rows, policy="static", sequences_per_step=8, steps=1, count_targets=True, check=False)
for step in run.steps():
    for micro_batch in step:
        class Once:
            # The three ways to hand over a loss are tried on one micro-batch: only names and arguments are looked at.
            def backward(self, loss, *, side=None, mean_over=None):
                assert loss.requires_grad and mean_over in (None, "targets", "tokens", "step")
        taken, step_, step = step.backward, step, Once()
        logits = model(**micro_batch.inputs).logits[0]
        values_t = losses_t = logits.logsumexp(-1)
        policy_loss = losses_t.mean()
        {block}
        step = step_
        step.backward(loss)
    step.update()
"""
AROUND = {
    "README.md#0": "",
    "CONTRIBUTING.md#2": "",
    "docs/guides/any-model.md#0": MODEL,
    "docs/guides/any-model.md#1": MODEL + IN_A_STEP,
    "docs/guides/any-model.md#3": MODEL
    + "def pack_or_pad(items): return lw.pad(items)\ndef mean_loss(model, batch): return model(**batch).loss\n",
    "docs/guides/any-model.md#4": MODEL,
    "docs/guides/fine-tune.md#0": "import shutil\nshutil.copytree('my-model', 'tuned', dirs_exist_ok=True)\n",
    "docs/guides/shapes.md#0": MODEL
    + "torch.compile = lambda module, **_: module  # the compiler has tests of its own\n",
    "docs/guides/sort.md#0": "import torch, torch.distributed\n"
    "torch.distributed.init_process_group('gloo', rank=0, world_size=1, store=torch.distributed.HashStore())\n"
    "lengths, ids, loss = torch.randint(1, 9, (20,)), torch.arange(20), torch.rand(20)\n",
    "docs/guides/sort.md#1": "import numpy as np\nnumbers = np.random.default_rng(0)\n"
    "np.save('metric.npy', numbers.random(100)); np.save('rows.npy', numbers.random((100, 3)))\n",
    "docs/guides/weights.md#0": MODEL,
    "docs/guides/training.md#0": MODEL
    + "from torch.optim.lr_scheduler import CosineAnnealingLR\nloader = [lw.pad(rows[:4]), lw.pad(rows[4:12])]\n"
    "stock = model\ndef model(batch): return stock(**batch)\n",
    "docs/internals/model.md#0": "",
}
"""What comes before blocks that are parts of a script of the reader's."""
NEEDS_TORCH = tuple(AROUND)
IN_DEEP_RUNS = ("docs/guides/shapes.md#0", "docs/guides/weights.md#0")
"""Blocks that take long, and of which others show most."""
IN_ONE_SCRIPT = ("docs/guides/objectives.md",)
"""Pages whose blocks follow one another, as they say."""
UNCHECKED = "from tests.runtime.harness import compare_where_asked\ncompare_where_asked()\n"
"""Leaves out the comparison of each run of a page, half of its time: its objectives have tests of their own."""
PARSED: dict[str, str] = {}
"""Blocks that are parsed alone, with the reason."""


def test_no_list_names_a_block_that_is_gone():
    assert {*AROUND, *PARSED} <= {block.key for block in PYTHON}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The files that blocks read."""
    folder = tmp_path_factory.mktemp("files")
    write_chats(folder / "chats.jsonl")
    write_model(folder / "my-model")
    plan = make_plan([lane(3.0, 2.0, 1.0), lane(1.0)], update_s=0.0)
    (folder / "plans.jsonl").write_text(json.dumps(plan.to_json()) + "\n")
    make_run(folder / "outputs" / "first", num_steps=4)
    (folder / "text").mkdir()
    for k in range(12):
        (folder / "text" / f"{k}.txt").write_text("words and words " * (k + 1))
    build_index(IndexSettings(source=folder / "text"), folder / "DIR", workers=1)
    return folder


@pytest.mark.parametrize("block", PYTHON, ids=named)
def test_every_name_exists_and_every_option_is_taken(block):
    """What a block imports, what it takes from ``lw``, and the names of the arguments it gives."""
    for node in ast.walk(ast.parse(block.text)):
        if isinstance(node, ast.ImportFrom):
            module = importlib.import_module(node.module or "")
            assert all(hasattr(module, alias.name) for alias in node.names), ast.unparse(node)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).startswith("lw."):
            function = getattr(lengthwise, ast.unparse(node.func).removeprefix("lw."))
            known = set(inspect.signature(function).parameters)
            assert {word.arg for word in node.keywords if word.arg} <= known, ast.unparse(node)


@pytest.mark.parametrize(
    "block",
    [
        pytest.param(block, marks=[pytest.mark.deep] * (block.key in IN_DEEP_RUNS))
        for block in PYTHON
        if block.key not in PARSED and block.page not in IN_ONE_SCRIPT
    ],
    ids=named,
)
def test_blocks_run(block, files, tmp_path, monkeypatch):
    monkeypatch.chdir(files)
    around = AROUND.get(block.key, "")
    if "{block}" in around:
        script = around.replace("{block}", textwrap.indent(block.text, " " * 8).lstrip())
    else:
        script = around + block.text
    if block.key not in NEEDS_TORCH:
        exec(compile(script, block.key, "exec"), {"__name__": "block"})
        return
    run_script(script if block.page == "README.md" else UNCHECKED + script, tmp_path)


@pytest.mark.parametrize("page", IN_ONE_SCRIPT)
@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.deep)])
def test_blocks_that_follow_one_another_run(page, num_ranks, files, tmp_path, monkeypatch):
    monkeypatch.chdir(files)
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", str(num_ranks)) if num_ranks > 1 else ()
    script = "".join(block.text for block in PYTHON if block.page == page)
    run_script(script if num_ranks > 1 else UNCHECKED + script, tmp_path, *torchrun)


def run_script(script, folder, *before):
    """Run a script in a process of its own, or in several."""
    (folder / "block.py").write_text(script)
    out = folder / "out"
    home = {"HOME": str(folder), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": ":".join(sys.path)}
    assert Command(*before, folder / "block.py", out=out, variables=home).wait(120) == 0, out.read_text()


@pytest.mark.parametrize("block", in_language("diff"), ids=named)
def test_both_sides_of_a_difference_are_python(block):
    for sign in "-+":
        side = [line[1:] for line in block.text.splitlines() if line[:1] in (sign, " ", "")]
        ast.parse(re.sub(r", \.\.\.(?=[,)])", "", textwrap.dedent("\n".join(side))))


@pytest.mark.deep
@pytest.mark.parametrize("notebook", NOTEBOOKS)
def test_cells_of_notebooks_run_without_torch(notebook, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torch", None)
    names: dict[str, object] = {}
    for number, cell in enumerate(cells(notebook)):
        cell = cell.replace('"steps": 3, "tokens_per_step": 200_000', '"steps": 1, "tokens_per_step": 70_000')
        exec(compile(cell, f"{notebook}, cell {number}", "exec"), names)
    assert "auto" in capsys.readouterr().out and np.isfinite(names["speeds"]["auto"])


def test_there_is_something_to_run():
    assert len(BLOCKS) > 40 and len(PYTHON) > 8 and NOTEBOOKS
