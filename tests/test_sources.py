"""Rules that the source code keeps: what reads foreign input, what prints foreign text, what errors advise."""

import ast
import gc
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import lengthwise
from lengthwise.config.run_config import Config
from lengthwise.core.garbage import collection_paused

ROOT = Path(lengthwise.__file__).parent

CONSOLES = ("session/console.py", "session/calibration.py")
"""The modules that make consoles of rich, all of them without markup."""
RESTRICTED_UNPICKLER = "runtime/state/metadata_reader.py"
"""PyTorch writes the metadata of a checkpoint as a pickle; its reader finds the few classes of metadata alone."""
SAFE_YAML = ("yaml.safe_dump", "yaml.MarkedYAMLError", "yaml.SafeLoader.")


@cache
def modules() -> dict[str, ast.Module]:
    """Every module of the package by its path, parsed once and not before a test asks; none of it is garbage."""
    gc.disable()
    try:
        return {str(path.relative_to(ROOT)): ast.parse(path.read_text()) for path in sorted(ROOT.rglob("*.py"))}
    finally:
        gc.enable()


@pytest.fixture(scope="module", autouse=True)
def _forget_modules() -> Iterator[None]:
    """Half a million objects, which would slow every garbage collection, while they come and later."""
    with collection_paused():
        yield
    for cached in (modules, nodes, calls, imports):
        cached.cache_clear()


@cache
def nodes(tree: ast.Module) -> list[ast.AST]:
    """All of its nodes, which takes longest to find, but for the words that say whether a name is read or written."""
    return [node for node in ast.walk(tree) if not isinstance(node, ast.expr_context)]


@cache
def calls(tree: ast.Module) -> list[tuple[str, ast.Call]]:
    """Every call with the dotted name of what is called."""
    return [(name_of(node.func), node) for node in nodes(tree) if isinstance(node, ast.Call)]


def name_of(node: ast.expr) -> str:
    """What is written there, found quickly where it is a name or a dotted one."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{name_of(node.value)}.{node.attr}"
    return ast.unparse(node)


@cache
def imports(tree: ast.Module) -> set[str]:
    """Modules, and names in modules, that are imported."""
    names = set()
    for node in nodes(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module or ""}
    return names


def test_nothing_that_is_read_is_executed():
    assert "def find_class" in ast.unparse(modules()[RESTRICTED_UNPICKLER])
    for module, tree in modules().items():
        if module != RESTRICTED_UNPICKLER:
            _check_nothing_is_executed(module, tree)


def _check_nothing_is_executed(module: str, tree: ast.Module) -> None:
    unsafe = {
        name for name in imports(tree) if name.split(".")[0] in ("pickle", "marshal", "shelve", "dill", "cloudpickle")
    }
    assert not unsafe, module
    for name, call in calls(tree):
        options = {option.arg: option.value for option in call.keywords}
        assert name not in ("eval", "exec", "compile", "__import__", "os.system", "os.popen"), f"{module}:{call.lineno}"
        assert not name.startswith("yaml.") or name.startswith(SAFE_YAML), f"{module}:{call.lineno}"
        shell = options.get("shell")
        assert shell is None or ast.unparse(shell) == "False", f"{module}:{call.lineno}"
        if name in ("np.load", "numpy.load"):
            assert ast.unparse(options.get("allow_pickle", ast.Constant(False))) == "False", f"{module}:{call.lineno}"
        if name == "torch.load":
            assert ast.unparse(options.get("weights_only", ast.Constant(True))) == "True", f"{module}:{call.lineno}"


def test_text_of_others_is_never_taken_for_markup():
    """rich is used for tables everywhere, for consoles and bars where markup is off."""
    for module, tree in modules().items():
        _check_no_markup(module, tree)


def _check_no_markup(module: str, tree: ast.Module) -> None:
    if module not in CONSOLES:
        assert not {
            "rich.print",
            "rich.console.Console",
            "rich.progress.Progress",
            "rich.markup.escape",
        } & _at_run_time(tree), module
    for name, call in calls(tree):
        markup = [ast.unparse(option.value) for option in call.keywords if option.arg == "markup"]
        assert markup in ([], ["False"]), f"{module}:{call.lineno}"
        if name.endswith("TextColumn") or name in ("Console", "PlainConsole"):
            assert markup == ["False"], f"{module}:{call.lineno}"


def _at_run_time(tree: ast.Module) -> set[str]:
    """Imports but for those under ``if TYPE_CHECKING``."""
    kept = [node for node in tree.body if not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))]
    return imports(tree if len(kept) == len(tree.body) else ast.Module(body=kept, type_ignores=[]))


SECTIONS = {
    name: field.annotation for name, field in Config.model_fields.items() if hasattr(field.annotation, "model_fields")
}
SETTING = re.compile(rf"(?<![\w/.-])({'|'.join(SECTIONS)})\.([a-z_0-9]+)\b(?!\()")
NO_SETTINGS = ("model.json", "model.safetensors", "model._orig_mod")
"""Files and parameters of models whose names look like settings."""


def test_every_setting_that_a_message_advises_exists():
    for module, tree in modules().items():
        if module != "models/hf_names.py":  # names of parameters alone
            _check_settings_exist(module, tree)


def _check_settings_exist(module: str, tree: ast.Module) -> None:
    docstrings = {id(node.value) for node in nodes(tree) if isinstance(node, ast.Expr)}
    for node in nodes(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            for match in SETTING.finditer(node.value):
                if match[0] not in NO_SETTINGS:
                    assert match[2] in SECTIONS[match[1]].model_fields, f"{module}:{node.lineno} names {match[0]}"


PICKLED = {"all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list", "send_object_list"}


def test_nothing_is_pickled_between_ranks():
    for module, tree in modules().items():
        names = {node.attr for node in nodes(tree) if isinstance(node, ast.Attribute)}
        assert not names & PICKLED, f"{module}: lengthwise.runtime.comm.objects sends JSON"


def test_the_lock_holds_the_versions_of_the_constraints():
    constraints = ROOT.parents[1] / "constraints"
    pinned = dict(line.split("==") for line in _lines(constraints / "cpu.txt"))
    locked = dict(line.split(" --hash=")[0].split("==") for line in _lines(constraints / "cpu.lock"))
    assert _normal(locked) == {name: version for name, version in _normal(pinned).items() if name != "torch"}
    assert all(re.search(r" --hash=sha256:[0-9a-f]{64}$", line) for line in _lines(constraints / "cpu.lock"))


def _lines(path: Path) -> list[str]:
    return [line for line in path.read_text().splitlines() if line and not line.startswith("#")]


def _normal(versions: dict[str, str]) -> dict[str, str]:
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in versions.items()}
