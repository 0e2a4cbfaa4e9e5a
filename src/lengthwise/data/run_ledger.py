"""What a run has learned from, by corpus: counted as it is computed, and held against what the sampler dealt."""

from collections.abc import Callable
from typing import Any

import numpy as np

from lengthwise.core.errors import CheckError, InputError
from lengthwise.core.step_plan import StepPlan
from lengthwise.data.corpus import Corpus, CorpusPart
from lengthwise.data.sampler import Sampler


class RunLedger:
    """Sequences and tokens seen of each part of a corpus, through stops and resumes; the content of ledger.json."""

    def __init__(self, corpus: Corpus, new_sampler: Callable[[], Sampler], *, seed: int) -> None:
        """``new_sampler`` makes one like the run's, to ask what it has dealt."""
        self._corpus, self._new_sampler, self._mixture = corpus, new_sampler, corpus.mixture(seed)
        self._seen = np.zeros((2, len(corpus.parts)), dtype=np.int64)
        """Sequences and tokens of each part."""

    def count(self, plan: StepPlan) -> None:
        """Take the sequences that a step has computed, each as long as it was, padding left out."""
        packs = [m.pack for pipeline in plan.pipelines for m in pipeline.micro_batches]
        ids = np.array([id for pack in packs for id in pack.ids], dtype=np.int64)
        self._seen += self._by_part(ids, np.array([length for pack in packs for length in pack.lengths]))

    def state_dict(self) -> dict[str, Any]:
        """What has been seen, in plain values."""
        sequences, tokens = self._seen.tolist()
        return {"sequences": sequences, "tokens": tokens}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there: what was counted since is forgotten, as it is trained again.

        Raises:
            InputError: the state is of another number of parts.
        """
        counts = [state.get(name) for name in ("sequences", "tokens")]
        if not all(isinstance(row, list) and len(row) == self._seen.shape[1] for row in counts):
            raise InputError(
                f"the checkpoint's ledger has {state}, the run has {self._seen.shape[1]} parts; resume from another"
            )
        self._seen = np.array(counts, dtype=np.int64)

    def check(self, stream_state: dict[str, Any]) -> None:
        """Raise ``CheckError`` unless what was seen is what a stream at this state has dealt, part by part."""
        dealt, sampler_state = self._dealt(stream_state), _of_sampler(stream_state)
        for what, of_seen, of_dealt in zip(("sequences", "tokens"), self._seen.tolist(), dealt.tolist()):
            for part, counted, expected in zip(self._corpus.parts, of_seen, of_dealt):
                if counted != expected:
                    raise CheckError(
                        f"part {part.name}: {counted:,} {what} were computed, {expected:,} dealt by the sampler, which "
                        f"is {sampler_state['position']:,} sequences into epoch {sampler_state['epoch']}; plans lost "
                        "or repeated some: compare plans.jsonl of the run with those of `lengthwise plan`"
                    )

    def to_json(self, stream_state: dict[str, Any]) -> dict[str, Any]:
        """Totals, and every part from its index to what has been seen of it."""
        sequences, tokens = self._seen.tolist()
        return {
            **self._corpus.ledger.to_json(),
            "steps": stream_state["step"],
            "epochs": _of_sampler(stream_state)["epoch"],
            "sequences_seen": sum(sequences),
            "tokens_seen": sum(tokens),
            "parts": [_of_part(*part_counts) for part_counts in zip(self._corpus.parts, sequences, tokens)],
        }

    def _dealt(self, stream_state: dict[str, Any]) -> np.ndarray:
        """Sequences and tokens of each part: of the epochs before and of the one the sampler is in, but what waits."""
        sampler, state = self._new_sampler(), _of_sampler(stream_state)
        rows = stream_state.get("held", {}).get("waiting", [])  # arrival, batch, id, length, targets
        waiting = np.array([row[2] for row in rows], dtype=np.int64)
        sampler.load_state_dict(state)
        ids, epoch = sampler.dealt, state["epoch"]
        before = [
            (self._mixture.taken(number, epoch), self._mixture.tokens_taken(number, epoch, part.view.lengths.lengths))
            for number, part in enumerate(self._corpus.parts)
        ]
        lengths = self._corpus.lengths.lengths
        dealt = np.array(before, dtype=np.int64).T + self._by_part(ids, lengths[ids])
        return dealt - self._by_part(waiting, lengths[waiting])

    def _by_part(self, ids: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """[2, num_parts] sequences and tokens."""
        parts = self._corpus.part_of(ids)
        of_part = [lengths[parts == number] for number in range(len(self._corpus.parts))]
        return np.array(
            [
                [len(lengths_of_part) for lengths_of_part in of_part],
                [lengths_of_part.sum(dtype=np.int64) for lengths_of_part in of_part],
            ],
            dtype=np.int64,
        )


def _of_sampler(stream_state: dict[str, Any]) -> dict[str, Any]:
    """The state of the sampler that a stream draws from, or is."""
    state: dict[str, Any] = stream_state.get("stream", stream_state)
    return state


def _of_part(part: CorpusPart, sequences_seen: int, tokens_seen: int) -> dict[str, Any]:
    intake = part.store.info["ledger"]
    refused = {reason: count for reason, count in intake.items() if reason not in ("documents", "examples") and count}
    return {
        "name": part.name,
        "index": str(part.store.path),
        "digest": part.store.digest,
        "repeat": float(part.repeat),
        "documents": intake["documents"],
        "refused": refused,
        **part.view.ledger.to_json(),
        "sequences_seen": sequences_seen,
        "tokens_seen": tokens_seen,
        "passes": sequences_seen / len(part.view.lengths),
    }
