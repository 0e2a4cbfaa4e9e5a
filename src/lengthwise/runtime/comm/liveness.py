"""Diagnosis of failed collectives: which ranks did not join, and what they do instead.

While all goes well, a thread of each rank looks once a second whether somebody asks, and that is all this costs. A rank
whose collective fails asks. Every rank that can answers from that thread, even if its main thread is in an endless
loop; one that is stopped or dead does not, which is the answer. A rank that ends with an error of its own says so
before. Questions go through the store by which the ranks met.
"""

import atexit
import json
import os
import time
from collections.abc import Mapping, Sequence
from threading import Event, Thread
from typing import Any

import torch.distributed as dist

from lengthwise.core.errors import CommunicationError, Setting
from lengthwise.runtime.comm.activity import ACTIVITY, first_line, is_timeout
from lengthwise.runtime.comm.differences import ranks_text

LOOK_EVERY_S = 1.0
ANSWER_S = 4.0
"""How long a rank that lives may take to answer."""
POLL_S = 0.05
LINGER_S = 5.0
"""How long a rank that fails waits for the others to hear it, if the store is gone with its process."""
MOST_TOLD = 8
"""Ranks whose place a message tells."""
_ASKED = "asked"
_KEPT_BY_TORCHRUN = "TORCHELASTIC_USE_AGENT_STORE"
"""The variable by which torchrun says that its own process keeps the store."""

Answers = Mapping[int, Mapping[str, Any]]


class Liveness:
    """This rank's part in asking and answering."""

    def __init__(self, store: dist.Store, *, rank: int, size: int, timeout_s: float, keeps_store: bool = False) -> None:
        """``store``: where all ranks meet; this takes a connection of its own. ``timeout_s``: to be told.

        ``keeps_store``: whether this process keeps it, so that nobody can ask any more when it has ended.
        """
        self._keeps_store = keeps_store
        clone = getattr(store, "clone", None)
        self._store = dist.PrefixStore("lengthwise/liveness", clone() if clone else store)
        self._rank, self._timeout_s = rank, timeout_s
        self._others = [other for other in range(size) if other != rank]
        self._keeper = os.getppid() if os.environ.get(_KEPT_BY_TORCHRUN) == "True" else None
        self._is_over = Event()
        self._thread = Thread(target=self._answer_when_asked, name="liveness", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # a thread inside the store while the interpreter ends aborts the process

    def close(self) -> None:
        """Stop answering other ranks."""
        atexit.unregister(self.close)
        self._is_over.set()
        self._thread.join()

    def say_failed(self, reason: str) -> None:
        """Say to ranks that ask, now or later, why this one ends."""
        try:
            self._write({"failed": reason})
            self._store.set(_heard(self._rank), "1")  # it asks nobody
        except RuntimeError:  # the store is gone, and with it everybody who could ask
            return

    def wait_until_heard(self) -> None:
        """Wait a while for all others to hear why this rank ends, or to fail too, if it keeps the store."""
        end_s = time.monotonic() + (LINGER_S if self._keeps_store else 0.0)
        while time.monotonic() < end_s:
            if self._store.check([_heard(rank) for rank in self._others]):
                return
            time.sleep(POLL_S)

    def explain(self, operation: str, error: BaseException) -> CommunicationError:
        """The error to raise where ``operation`` failed with ``error``; asks all ranks, for a few seconds."""
        try:
            answers = self._ask(operation)
        except RuntimeError as gone:
            return CommunicationError(
                f"{ACTIVITY.place}: {operation} failed, and the other ranks cannot be asked why, for the process that "
                f"keeps their store is gone ({first_line(gone)})"
            )
        failed = {rank: str(answer["failed"]) for rank, answer in answers.items() if "failed" in answer}
        if failed:
            return CommunicationError(f"rank {min(failed)} failed: {failed[min(failed)]}")
        why = "; ".join(_reasons(answers, self._others)) or first_line(error)
        if not is_timeout(error):
            return CommunicationError(f"{ACTIVITY.place}: {operation} lost a rank: {why}")
        return CommunicationError(
            f"{ACTIVITY.place}: {operation} was not over within {self._timeout_s:g} s: {why}. If ranks are only slow, "
            f"raise {Setting.TIMEOUT_S}"
        )

    def _ask(self, operation: str) -> dict[int, dict[str, Any]]:
        self._write({**ACTIVITY.to_json(), "waits_for": operation})
        self._store.set(_ASKED, "1")
        answers: dict[int, dict[str, Any]] = {}
        end_s = time.monotonic() + ANSWER_S
        while True:
            for rank in self._others:
                if rank not in answers and self._store.check([_key(rank)]):
                    answers[rank] = json.loads(self._store.get(_key(rank)))
            has_cause = any("failed" in answer for answer in answers.values())
            if has_cause or len(answers) == len(self._others) or time.monotonic() > end_s:
                self._store.set(_heard(self._rank), "1")
                return answers
            time.sleep(POLL_S)

    def _write(self, answer: Mapping[str, Any]) -> None:
        self._store.set(_key(self._rank), json.dumps(answer))

    def _answer_when_asked(self) -> None:
        try:
            while not self._is_over.wait(LOOK_EVERY_S):
                if self._keeper not in (None, os.getppid()):  # torch prints its stack where a store is gone
                    return
                if self._store.check([_ASKED]):
                    if not self._store.check([_key(self._rank)]):  # else the main thread has answered
                        self._write(ACTIVITY.to_json())
                    return
        except RuntimeError:  # the store is gone, and with it everybody who could ask
            return


def _reasons(answers: Answers, ranks: Sequence[int]) -> list[str]:
    """Reasons, from their ``answers``, why ``ranks`` did not join."""
    silent = [rank for rank in ranks if rank not in answers]
    reasons = [f"no answer from {ranks_text(silent)} (killed, stopped, or cut off)"] if silent else []
    for rank, answer in sorted(answers.items()):
        if not answer["waits_for"]:
            reasons.append(f"rank {rank} did not come, it is at {answer['place']} for {answer['since_s']:.0f} s")
    if not reasons:
        reasons = [
            f"rank {rank} waits at {answer['place']}: {answer['waits_for']}" for rank, answer in sorted(answers.items())
        ]
    return reasons[:MOST_TOLD]


def _key(rank: int) -> str:
    return f"rank_{rank}"


def _heard(rank: int) -> str:
    """The key of a rank that asks no more."""
    return f"heard_{rank}"
