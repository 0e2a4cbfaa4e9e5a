"""Python commands in processes that need not import torch: forked from one that has, as are all that they start.

Real processes with real signals; what they skip is the seconds in which every one of them would import the same.
"""

import json
import os
import random
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing import forkserver, get_context, resource_tracker, util
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

PRELOADED = [
    "torch.distributed.run",
    "torch.distributed.tensor",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch._dynamo",  # the first optimizer imports it
    "transformers.models.llama.modeling_llama",
    "lengthwise.session.prepare",
    "lengthwise.cli.commands.train",
    "lengthwise.cli.train_config",
    "lengthwise.cli.worker",
    "lengthwise.plan.policies",
    "lengthwise.runtime.models.hf_folder",
    "lengthwise.runtime.train.trainer",
    "tests.short_profiles",
    "tests.frozen",
]
SHARED = "LENGTHWISE_TESTS_FORKSERVER"
"""The variable that names the server which the process that starts workers has: they need none of their own."""
POLL_S = 0.01
_POPEN = subprocess.Popen
util.get_temp_dir()  # for sockets, whose paths are short; later it would be below a test's own TMPDIR


def context() -> ForkServerContext:
    """Starts processes that have imported all that takes long."""
    found, server = get_context("forkserver"), _server()
    found.set_forkserver_preload(PRELOADED)
    if SHARED in os.environ and server._forkserver_address is None:
        server._forkserver_address, key = json.loads(os.environ[SHARED])
        server._forkserver_authkey = key and bytes.fromhex(key)
        _, server._forkserver_alive_fd = os.pipe()  # what is alive is the other process
        server.ensure_running = resource_tracker.ensure_running
    return found


def serve_workers() -> None:
    """Start the server, for this process and for all that it starts."""
    context()
    forkserver.ensure_running()
    server = _server()
    key = getattr(server, "_forkserver_authkey", None)  # newer versions of Python have one
    os.environ[SHARED] = json.dumps([server._forkserver_address, key and key.hex()])


def _server() -> Any:
    return forkserver._forkserver  # type: ignore[attr-defined]


class Command:
    """``python ARGUMENTS``: a module by ``-m``, or a script."""

    def __init__(
        self, *arguments: object, out: Path, err: Path | None = None, variables: Mapping[str, str] | None = None
    ) -> None:
        """Begin it. What it and its ranks print goes to ``out``, and what they complain of to ``err`` or there too."""
        words, environment = [str(word) for word in arguments], {**os.environ, **(variables or {})}
        self.ranks = out.with_name(f"{out.name}.ranks")
        """A file for each rank that was started, ``rank.pid``."""
        self.ranks.mkdir(exist_ok=True)
        for path in self.ranks.iterdir():
            path.unlink()
        files = (str(out), str(err or out))
        for name in files:
            Path(name).write_text("")
        self._process = context().Process(target=_begin, args=(words, environment, files, os.getcwd(), str(self.ranks)))
        self._process.start()
        self.pid: int = self._process.pid  # type: ignore[assignment]

    def poll(self) -> int | None:
        """Its exit code if it has ended."""
        return self._process.exitcode

    def wait(self, timeout: float) -> int:
        """Its exit code when it has ended."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(str(self._process), timeout)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        """To it alone, not to its ranks."""
        if self.poll() is None:
            os.kill(self.pid, number)


def _begin(words: list[str], environment: dict[str, str], files: tuple[str, str], folder: str, ranks: str) -> None:
    for number, name in zip((1, 2), files):
        descriptor = os.open(name, os.O_WRONLY | os.O_APPEND)
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(folder)
    Forked.ranks = Path(ranks)
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    subprocess.Popen = subprocess_handler.Popen = Forked  # type: ignore[misc,assignment]
    _run(words, environment)


def _run(words: Sequence[str], environment: Mapping[str, str]) -> None:
    """Be ``python WORDS`` in this process."""
    import numpy as np
    import torch

    torch.seed(), random.seed(), np.random.seed()  # a new process draws other numbers than its siblings
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # a new process would look at TMPDIR
    torch.set_num_threads(int(environment.get("OMP_NUM_THREADS", "1")))
    words = [word for word in words if word != "-u"]
    if words[0] == "-m":
        sys.argv = list(words[1:])
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(words)
        runpy.run_path(words[0], run_name="__main__")


class Forked:
    """What of ``subprocess.Popen`` torchrun and scripts use, for ``python ...``: forked from here; else that itself."""

    ranks = Path()

    def __new__(cls, args: Sequence[str], *others: Any, **options: Any) -> Any:
        """A process of this kind, or of the ordinary one."""
        return super().__new__(cls) if args[0] == sys.executable else _POPEN(args, *others, **options)

    def __init__(
        self, args: Sequence[str], env: Mapping[str, str] | None = None, *, start_new_session: bool = False,
        **others: Any,
    ) -> None:  # fmt: skip
        assert not any(others.values()), (args, others)
        self.args, self.returncode = args, None
        environment = dict(os.environ if env is None else env)
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            _be(list(args[1:]), environment, start_new_session)
        if "RANK" in environment:
            (self.ranks / f"{environment['RANK']}.{self.pid}").touch()

    def poll(self) -> int | None:
        """Its exit code if it has ended."""
        if self.returncode is None:
            with suppress(ChildProcessError):
                ended, status = os.waitpid(self.pid, os.WNOHANG)
                self.returncode = os.waitstatus_to_exitcode(status) if ended else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code when it has ended."""
        end = time.monotonic() + (timeout if timeout is not None else 1e9)
        while self.poll() is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            time.sleep(POLL_S)
        return self.returncode  # type: ignore[return-value]

    def communicate(self, input: None = None, timeout: float | None = None) -> tuple[None, None]:
        """Wait for it."""
        self.wait(timeout)
        return None, None

    def __enter__(self) -> "Forked":
        return self

    def __exit__(self, *_: object) -> None:
        self.wait()


def _be(words: list[str], environment: dict[str, str], is_session: bool) -> None:
    """Be the command, as far as a forked process can: only the standard files are open, signals end it."""
    code = 1
    try:
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if is_session:
            os.setsid()
        _run(words, environment)
        code = 0
    except SystemExit as leave:
        code = leave.code if isinstance(leave.code, int) else int(leave.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
