"""The shim of dry runs: built once, and one clear error where it cannot be."""

import subprocess
from pathlib import Path

import pytest
import torch

from lengthwise.core.errors import InputError
from lengthwise.runtime.dryrun import shim

TORCH = Path(torch.__file__).parent


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path / ".cache" / "lengthwise"


@pytest.fixture
def compiled(monkeypatch):
    """Commands of a compiler that writes something else at once."""
    ran = []

    def compile_shim(command, **_):
        ran.append(command)
        Path(command[-1]).write_bytes(b"shim")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", compile_shim)
    return ran


def assert_built_once(cache, monkeypatch):
    built = shim.built_shim(TORCH, torch.__version__)
    assert built.parent == cache and [path.name for path in cache.iterdir()] == [built.name]
    monkeypatch.setenv("PATH", "")
    assert shim.built_shim(TORCH, torch.__version__) == built


def test_it_is_built_once(cache, compiled, monkeypatch):
    assert_built_once(cache, monkeypatch)
    assert len(compiled) == 1


@pytest.mark.deep
def test_a_compiler_builds_it_once(cache, monkeypatch):
    assert_built_once(cache, monkeypatch)


def test_without_a_home_that_can_be_written_it_is_built_for_the_process(compiled, monkeypatch):
    monkeypatch.setenv("HOME", "/dev/null")
    built = shim.built_shim(TORCH, torch.__version__)
    assert built.read_bytes() == b"shim" and len(compiled) == 1
    assert built != shim.built_shim(TORCH, torch.__version__), "nothing is left behind that others could find"


def test_without_a_compiler_it_says_which_to_install(cache, monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(InputError, match=r"needs a C\+\+ compiler once, and none of c\+\+, g\+\+, clang\+\+"):
        shim.built_shim(TORCH, torch.__version__)


def test_a_compiler_that_fails_is_named_with_its_error(cache, monkeypatch):
    failed = subprocess.CompletedProcess([], 1, "", "shim.cpp:1: error: no <optional>\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(InputError, match=r"cannot build the shim .* error: no <optional>"):
        shim.built_shim(TORCH, torch.__version__)


def test_a_torch_without_packed_attention_is_refused(monkeypatch):
    monkeypatch.setattr(shim, "_installed_torch", lambda: (TORCH, "2.9.1+cpu", None))
    monkeypatch.delitem(shim.sys.modules, "torch")
    with pytest.raises(InputError, match=r"torch 2\.9\.1\+cpu has no packed attention.* install torch 2\.10"):
        shim.load_shim()
