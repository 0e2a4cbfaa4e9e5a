"""A run that would lose hours of work to a kill says so once, and which setting helps."""

import re
import shutil
from types import SimpleNamespace

import pytest

from lengthwise.cli.advice import CheckpointAdvice, space_warning
from lengthwise.config.run_config import check
from lengthwise.core.run_folder import RunFolder
from lengthwise.core.wording import GIB


@pytest.mark.parametrize(
    ("train", "step_time_s", "words"),
    [
        (
            {"steps": 1000},
            30.0,
            "with train.checkpoint_every=0 up to 8.3 hours .*; 60 would save about every 30 minutes",
        ),
        ({"steps": 1000, "checkpoint_every": 200}, 30.0, "train.checkpoint_every=200 up to 1.7 hours"),
        ({"steps": 10}, 7000.0, "up to 13.6 hours .*; 1 would save about every 117 minutes"),
        ({"steps": 1000, "checkpoint_every": 100}, 30.0, None),
        ({"steps": 100}, 30.0, None),
        ({"steps": 2}, 7000.0, None),
    ],
)
def test_hours_of_work_without_a_checkpoint_are_warned_of_once(train, step_time_s, words):
    said = []
    advice = CheckpointAdvice(check({"train": train}).train, said.append)
    for step in range(min(train["steps"], 10)):
        advice.on_step({"step": step, "perf/step_time_s": step_time_s if step else 10 * step_time_s})
    advice.close()
    assert len(said) == (words is not None)
    if words is not None:
        assert re.search(words, said[0]), said[0]


@pytest.mark.parametrize(
    ("free_gib", "num_there", "words"),
    [
        (3.0, 0, None),
        (2.9, 0, "has 2.9 GiB free, 3 checkpoints to come need 3.0 GiB"),
        (1.0, 2, None),
        (0.5, 5, "1 check"),
    ],
)
def test_a_disk_without_room_for_the_checkpoints_to_come_is_warned_of(
    tmp_path, monkeypatch, free_gib, num_there, words
):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=int(free_gib * GIB)))
    trainer = SimpleNamespace(
        folder=RunFolder(tmp_path),
        checkpoint_bytes=GIB,
        config=SimpleNamespace(train=SimpleNamespace(keep_checkpoints=2)),
        counted_checkpoints=[None] * num_there,
    )
    warning = space_warning(trainer)
    assert (warning is None) == (words is None)
    assert words is None or words in warning
