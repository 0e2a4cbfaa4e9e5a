"""Builds and loads the shim by which fake tensors on device "cuda" work with a CPU build of torch. Imports no torch."""

import atexit
import ctypes
import hashlib
import os
import runpy
import shutil
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from lengthwise.core.errors import InputError, first_line, missing_package

SOURCE = Path(__file__).with_name("shim.cpp")
COMPILERS = ("c++", "g++", "clang++")
OLDEST_TORCH = (2, 10)
"""The first torch with packed attention (``torch.nn.attention.varlen``), which GPUs run."""


def load_shim() -> None:
    """Load the shim, built at first use; a CUDA build of torch needs none. To be called before torch is imported.

    Raises:
        InputError: torch is missing or too old, or no C++ compiler works.
    """
    assert "torch" not in sys.modules, "the shim has to be loaded before torch"
    folder, version, cuda = _installed_torch()
    if tuple(map(int, version.split(".")[:2])) < OLDEST_TORCH:
        wanted = ".".join(map(str, OLDEST_TORCH))
        raise InputError(
            f"torch {version} has no packed attention, which a dry run follows; install torch {wanted} or later"
        )
    if cuda is None:
        ctypes.CDLL(str(built_shim(folder, version)), mode=ctypes.RTLD_GLOBAL).install()


def built_shim(torch_folder: Path, version: str) -> Path:
    """The compiled shim for this torch, from the user's cache or made now."""
    source = SOURCE.read_bytes()
    digest = hashlib.blake2b(f"{version} {torch_folder} {sys.platform}".encode() + source, digest_size=8).hexdigest()
    cache = Path(os.path.expanduser("~")) / ".cache" / "lengthwise"
    built = cache / f"fake-cuda-{digest}.so"
    if built.is_file() and built.stat().st_uid == os.getuid():
        return built
    compiler = next((path for name in COMPILERS if (path := shutil.which(name))), None)
    if compiler is None:
        raise InputError(
            f"a dry run with a CPU build of torch needs a C++ compiler once, and none of {', '.join(COMPILERS)} is on "
            "the PATH; install one (apt-get install g++), or use a CUDA build of torch"
        )
    cache = _writable(cache)
    built = cache / built.name
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        target = Path(scratch) / "shim.so"
        includes = [f"-I{torch_folder / 'include' / part}" for part in ("", "torch/csrc/api/include")]
        library = torch_folder / "lib"
        command = [
            compiler, "-std=c++20", "-O1", "-shared", "-fPIC", str(SOURCE), *includes, f"-L{library}", "-lc10",
            "-ltorch_cpu", f"-Wl,-rpath,{library}", "-o", str(target),
        ]  # fmt: skip
        ran = subprocess.run(command, capture_output=True, text=True)
        if ran.returncode:
            errors = [line for line in ran.stderr.splitlines() if "error" in line] or [
                ran.stderr.strip() or "no message"
            ]
            raise InputError(
                f"{compiler} cannot build the shim of dry runs for torch {version}: {errors[0]}; install another "
                "compiler (g++ 11 or later), or use a CUDA build of torch"
            )
        target.replace(built)
    return built


def _writable(cache: Path) -> Path:
    """The cache; if nothing can be written there, as in containers, a folder that lasts as long as this process."""
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=cache):
            return cache
    except OSError:
        folder = tempfile.mkdtemp(prefix="lengthwise-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        return Path(folder)


def _installed_torch() -> tuple[Path, str, str | None]:
    """Folder, version and CUDA version of the installed torch, without importing it."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        raise missing_package("a dry run", "torch")
    folder = Path(spec.origin).parent
    try:
        values = runpy.run_path(str(folder / "version.py"))
    except OSError as error:
        raise InputError(f"torch at {folder} is damaged ({first_line(error)}); install it again") from None
    return folder, values["__version__"], values["cuda"]
