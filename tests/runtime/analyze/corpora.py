"""Small indexes of random tokens, a user's module beside them, and analyses of them on the ranks of a pool."""

import json
from contextlib import chdir
from pathlib import Path

import numpy as np

from lengthwise.core.errors import LengthwiseError
from lengthwise.index.build import build_index
from lengthwise.index.settings import IndexSettings
from lengthwise.index.store import TokenStore, open_index
from lengthwise.runtime.analyze.analysis import Analysis, analyze
from lengthwise.runtime.analyze.request import AnalysisRequest, parse_metric
from tests.runtime.train.runs import local_world

BROKEN_ID = 11
USERS_MODULE = f"""
import os
import sys
from pathlib import Path

import numpy as np

FLAG = Path(__file__).with_name("flag")
NOT_A_FUNCTION = 3


def mean_token(tokens, id):
    return float(tokens.mean() // 8)  # many are equal


def num_distinct(tokens, id):
    return len(np.unique(tokens))


def narrow(tokens, id):
    return np.float32(id / 3)


def mixed(tokens, id):
    return id if id % 2 else id / 4


def fails(tokens, id):
    if id == {BROKEN_ID} and FLAG.exists():
        raise OSError("the disk is away")
    return float(id)


def kills(tokens, id):
    if id == {BROKEN_ID} and FLAG.exists():
        os.kill(os.getpid(), 9)
    return float(id)


def exits(tokens, id):
    if id == {BROKEN_ID} and FLAG.exists():
        sys.exit(0) if FLAG.read_text() == "sys.exit" else os._exit(0)
    return float(id)


def writes(tokens, id):
    tokens[0] = 0


def gives(tokens, id):
    return {{"nan": float("nan"), "inf": np.inf, "none": None, "array": np.zeros(2), "text": "1", "huge": 2**63}}[
        FLAG.read_text()
    ]
"""


def make_index(folder: Path, lengths: list[int], *, vocab_size: int = 61) -> TokenStore:
    """Sequences of these lengths, their tokens drawn by id; the first one has the largest token."""
    rows = [np.random.default_rng(id).integers(0, vocab_size, length).tolist() for id, length in enumerate(lengths)]
    rows[0][-1] = vocab_size - 1
    source = folder / "tokens.jsonl"
    source.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    build_index(IndexSettings(source=source), folder / "index", workers=1)
    return open_index(folder / "index")


def some_lengths(count: int, *, longest: int = 40) -> list[int]:
    """Mostly short, some equal, some of one token."""
    return [1 + round((longest - 1) * (number * 37 % count / count) ** 3) for number in range(count)]


def users_module(folder: Path) -> str:
    """The name of a module in ``folder``, which no other test has imported."""
    name = f"metrics_of_{abs(hash(folder))}"
    (folder / f"{name}.py").write_text(USERS_MODULE)
    return name


def request_of(metric: str, *, name: str | None = None, **settings) -> AnalysisRequest:
    kind, target, usual = parse_metric(metric)
    return AnalysisRequest(kind=kind, target=target, name=name or usual, **settings)


def analyze_here(
    index: Path, request: AnalysisRequest, *, restart: bool = False
) -> tuple[Analysis, list[tuple[int, ...]]]:
    """As a rank of a pool, in the folder of the index: the outcome, and the progress that was shown."""
    shown: list[tuple[int, ...]] = []
    with chdir(index.parent):
        made = analyze(
            request, open_index(index), local_world(), restart=restart, on_progress=lambda *done: shown.append(done)
        )
    return made, shown


def error_here(index: Path, *requests: AnalysisRequest, restart: bool = False) -> list[tuple[str, int]]:
    """The message and exit code that analyses end with on this rank."""
    return [_error_of(index, request, restart=restart) for request in requests]


def _error_of(index: Path, request: AnalysisRequest, *, restart: bool) -> tuple[str, int]:
    try:
        with chdir(index.parent):
            analyze(request, open_index(index), local_world(), restart=restart)
    except LengthwiseError as error:
        return str(error), error.exit_code
    return "", 0
