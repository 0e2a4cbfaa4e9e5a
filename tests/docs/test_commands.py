"""Every command in README and docs is one that the command line takes; the quick ones run."""

import re
import shutil
import sys
import tomllib
from glob import glob
from pathlib import Path

import numpy as np
import pytest
import typer.main

from lengthwise.cli.main import app, main
from lengthwise.config.run_config import check, load
from lengthwise.core.read_yaml import parse_yaml
from lengthwise.session.demo_settings import POLICIES
from tests.docs.blocks import BLOCKS, LANGUAGES, PAGES, ROOT, commands, in_language, unfenced, write_modules
from tests.docs.user_files import write_profile, write_tokenizer
from tests.report.fake_run import make_run

SHELL = in_language("bash")
COMMANDS = [(block, words) for block in SHELL for words in commands(block.text)]
GROUP = typer.main.get_command(app)
OVERRIDE = re.compile(r"^[a-z_]+(\.[a-z_]+)*=")
TEXT = "def count(words):\n    return {word: words.count(word) for word in set(words)}\n"
QUICK: dict[str, tuple[str, ...]] = {
    "config": (),
    "stats": (),
    "memory": ("--gpus", "4"),
    "compare": ("--steps", "1", "--policies", "static,packed", "--tokens-per-step", "100000"),
    "index": ("--workers", "1"),
    "plan": ("plan.policy=static", "plan.profile=", "--steps", "2"),
    "simulate": ("--steps", "1"),
    "report": (),
}
"""Commands that run here, and what makes them quick; all others need ranks or a checkpoint, and are parsed."""
FEWER = {
    "--gpus": {"64": "8", "8,64": "2,4", "16,64": "8"},
    "--policies": {"static,auto": "static,packed"},
    "--max-length": {"256K": "16K"},
    "--length": {"5M": "1M"},
}
"""Devices, policies and lengths in place of those that only take longer to search."""
NOT_HERE = ("--python-stdlib", "--trace-steps", "shards", "my_dataset", "corpus_text_document", "data.metric=loss")
"""Words of commands that need what is large, what tests of the readers have, or a metric that a model computed."""

IN_DEEP_RUNS = (
    "docs/concepts/memory.md:lengthwise memory --model llama-3-8b --device H100-80GB --gpus 8 ",
    "docs/concepts/planning.md:lengthwise compare --lengths commoncrawl --model llama-13b --gpus 64 ",
    "docs/get-started/plan-without-gpus.md:lengthwise compare --lengths commoncrawl --model llama-13b --gpus 16,64 ",
    "docs/get-started/plan-without-gpus.md:lengthwise compare --lengths commoncrawl --model llama-13b --gpus 64 ",
)
"""Pages and beginnings of blocks that take longest; other blocks have the same commands, tests of them the options."""


def named(value):
    return value if isinstance(value, str) else f"{value.page}:{value.line}" if hasattr(value, "page") else value[0]


@pytest.mark.parametrize("page", PAGES)
def test_every_block_is_fenced_and_says_its_language(page):
    assert not unfenced(page), f"{page}: indented blocks at lines {unfenced(page)}; fence them and name the language"
    for block in BLOCKS:
        assert block.page != page or block.language in LANGUAGES, f"{page}:{block.line}: {block.language!r}"


@pytest.mark.parametrize(("block", "words"), COMMANDS, ids=lambda value: named(value))
def test_every_command_is_taken(block, words):
    place = f"{block.page}:{block.line}: {' '.join(words)}"
    words = [word for word in words if word not in (">", "<")]
    match words:
        case ["lengthwise", command, *arguments]:
            check_lengthwise(command, arguments, place)
        case ["torchrun" | "python" | ".venv/bin/python", *others] if "-m" in others:
            start = others.index("-m") + 1
            assert others[start] == "lengthwise", place
            check_lengthwise(others[start + 1], others[start + 2 :], place)
        case ["torchrun" | "python" | ".venv/bin/python", *others]:
            others = [f"{word}/__main__.py" if (ROOT / word).is_dir() else word for word in others]
            scripts = [word for word in others if word.endswith(".py")]
            assert scripts and all((ROOT / script).exists() or "/" not in script for script in scripts), place
            text = "".join((ROOT / script).read_text() for script in scripts if (ROOT / script).exists())
            after = others[others.index(scripts[0]) + 1 :]
            assert all(f'"{word}"' in text for word in after if word.startswith("--")), place
        case ["make", *targets]:
            assert set(targets) <= set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M)), place
        case ["pip", "install", *packages]:
            extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
            asked = [
                extra for package in packages for part in re.findall(r"\[(.*)\]", package) for extra in part.split(",")
            ]
            assert set(asked) <= set(extras), place
        case ["source" | "export" | "mkdir" | "cat", *_]:
            pass
        case _:
            pytest.fail(f"{place}: no test knows this program")


def check_lengthwise(name, arguments, place):
    """Parse the command as the command line does, and read every setting in it."""
    command = GROUP.get_command(typer.Context(GROUP), name)
    assert command is not None, place
    with command.make_context(name, list(arguments)) as context:  # ends the process at an unknown option
        given = context.params
    texts = [str(value) for name, value in given.items() if name not in ("glob",) for value in as_list(value)]
    load(None, [text for text in texts if OVERRIDE.match(text) and not text.startswith("loss=")])


def as_list(value):
    return value if isinstance(value, list | tuple) else [value]


@pytest.mark.parametrize("block", in_language("yaml"), ids=named)
def test_every_configuration_is_valid(block):
    check(parse_yaml(block.text))


def quick_commands(block):
    for words in commands(block.text):
        if words[0] == "lengthwise" and words[1] in QUICK and not set(words) & set(NOT_HERE):
            yield words[1:]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The files that the docs speak of, small."""
    folder = tmp_path_factory.mktemp("files")
    numbers = np.random.default_rng(0)
    write_modules(folder)
    write_profile(folder / "profile.json")
    np.save(folder / "lengths.npy", np.minimum(numbers.lognormal(6, 1, 400).astype(np.int64) + 2, 4096))
    for source in ("SRC", "corpora/web"):
        (folder / source).mkdir(parents=True)
        for k in range(40):
            (folder / source / f"{k}.py").write_text(TEXT * int(numbers.geometric(0.2)))
    lengthwise(["index", str(folder / "SRC"), "--out", str(folder / "DIR"), "--workers", "1"])
    for copy in ("INDEX", "outputs/corpus"):
        shutil.copytree(folder / "DIR", folder / copy)
    text = "data: {index: DIR, max_length: 512, over_length: split, tokens_per_step: 2048}\ncluster: {name: 4xcpu}\n"
    text += "plan: {policy: static}\n"  # which is ready at once
    for name in ("CONFIG", "config.yaml", "run.yaml"):
        (folder / name).write_text(text)
    lengthwise(["plan", str(folder / "CONFIG"), f"data.index={folder / 'DIR'}", "plan.policy=static", "--steps", "8",
                "--out", str(folder / "plans.jsonl")])  # fmt: skip
    write_tokenizer(folder / "my-model")
    for policy in POLICIES:  # as the demo leaves them
        make_run(folder / "outputs" / "demo" / "20260101-120000" / policy, policy=policy, name=policy, num_steps=4)
    for run in ("RUN", "PADDED", "PACKED", "BALANCED", "outputs/first"):
        make_run(folder / run, num_steps=4)
    return folder


def lengthwise(arguments):
    """Run the command line in this process; its exit code must be 0."""
    before, sys.argv = sys.argv, ["lengthwise", *arguments]
    try:
        main()
    except SystemExit as leave:
        assert not leave.code, arguments
    finally:
        sys.argv = before


@pytest.mark.parametrize(
    "block",
    [
        pytest.param(block, marks=[pytest.mark.deep] * f"{block.page}:{block.text}".startswith(IN_DEEP_RUNS))
        for block in SHELL if list(quick_commands(block))
    ],
    ids=named,
)  # fmt: skip
def test_quick_commands_run(block, files, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "here"
    shutil.copytree(files, folder)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for target, text in re.findall(r"> (\S+) <<'END'\n(.*?)^END$", block.text, re.S | re.M):
        Path(target).parent.mkdir(parents=True, exist_ok=True)
        Path(target).write_text(text)
    if not Path("outputs/run.yaml").exists():
        Path("outputs/run.yaml").write_text(Path("run.yaml").read_text())
    for words in quick_commands(block):
        words = [FEWER.get(option, {}).get(word, word) for option, word in zip(["", *words], words)]
        added = list(QUICK[words[0]])
        if words[0] == "index":
            shutil.rmtree("DIR", ignore_errors=True)
        if "--policies" in words:
            added = [word for word in added if word not in ("--policies", "static,packed")]
        if "--reach" in words:  # one step of each length
            added = [word for word in added if word not in ("--steps", "1")]
        if words[0] == "simulate" and any(word.startswith("data.index=") for word in words):
            added.append("plan.policy=static")  # which is ready at once
        if any(word.startswith("plan.policy") for word in words):
            added = [word for word in added if not word.startswith("plan.policy")]
        if any(word.startswith("plan.profile") for word in words):
            added = [word for word in added if not word.startswith("plan.profile")]
        words = [path for word in words for path in (sorted(glob(word)) if "*/" in word else [word])]
        lengthwise([*words, *added])
        assert capsys.readouterr().out or words[0] == "index", words
