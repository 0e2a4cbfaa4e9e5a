"""Samples of text: the tokens that one device would choose, on any number of ranks, and training goes on as without."""

import pytest
import torch

from lengthwise.core.run_folder import RunFolder
from lengthwise.runtime.models.registry import build_model
from lengthwise.runtime.train.text_samples import TextSampling, predicting
from tests.runtime.train.runs import local_world, master_weights, new_state
from tests.runtime.train.test_trainer import make_trainer, run_whole
from tests.sim.random_plans import SPEC

PROMPTS = (("a", (1, 2, 3)), ("b", (7,)))


def sampling(**changes) -> TextSampling:
    values = {
        "prompts": PROMPTS, "decode": lambda ids: " ".join(map(str, ids)), "vocab_size": SPEC.vocab_size,
        "eos_id": None, "every": 2, "max_tokens": 5, "temperature": 0.0, "seed": 3,
    }  # fmt: skip
    return TextSampling(**{**values, **changes})


def sample_on_ranks(changes: dict) -> tuple[list[dict], bool]:
    world = local_world()
    model, state = new_state(world, torch.float64)
    before, generator = state.master.clone(), torch.get_rng_state()
    with predicting(model, state) as logits_of:
        rows = [] if logits_of is None else sampling(**changes).rows(4, logits_of)
    is_same = torch.equal(state.master, before) and torch.equal(torch.get_rng_state(), generator)
    return rows, is_same


def greedy(prompt: tuple[int, ...], count: int) -> list[int]:
    model, tokens = build_model(SPEC, dtype=torch.float64, seed=1), list(prompt)
    for _ in range(count):
        with torch.no_grad():
            tokens.append(int(model.logits(torch.tensor(tokens), (0, len(tokens)))[-1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("num_ranks", [1, 2, pytest.param(4, marks=pytest.mark.deep)])
def test_greedy_samples_are_the_likeliest_tokens_and_change_nothing(ranks, num_ranks):
    (rows, is_same), *others = ranks(num_ranks).run(sample_on_ranks, {})
    assert [row["text"] for row in rows] == [" ".join(map(str, greedy(tokens, 5))) for _, tokens in PROMPTS]
    assert [(row["step"], row["prompt"], row["num_tokens"]) for row in rows] == [(3, "a", 5), (3, "b", 5)]
    assert is_same and all(other == ([], True) for other in others)


def test_a_temperature_draws_the_same_tokens_again_and_an_end_ends_the_text(ranks):
    ((cold, _),) = ranks(1).run(sample_on_ranks, {})
    ((warm, _),) = ranks(1).run(sample_on_ranks, {"temperature": 1.0})
    assert ranks(1).run(sample_on_ranks, {"temperature": 1.0})[0][0] == warm != cold
    ((tiny, _),) = ranks(1).run(sample_on_ranks, {"temperature": 1e-6})
    assert tiny == cold
    first = int(cold[0]["text"].split()[0])
    ((ended, _),) = ranks(1).run(sample_on_ranks, {"eos_id": first})
    assert ended[0]["num_tokens"] == 0


def run_sampled(path: str) -> dict[str, torch.Tensor]:
    trainer = make_trainer(path, steps=5)
    trainer.samples = sampling()
    trainer.fit()
    return master_weights(trainer.state)


@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.deep)])
def test_a_run_with_samples_learns_the_same_and_records_them(ranks, tmp_path, num_ranks):
    """Two ranks sample by default in tests/cli/commands/test_train.py."""
    expected = ranks(num_ranks).run(run_whole, str(tmp_path / "plain"), steps=5)[0]
    weights = ranks(num_ranks).run(run_sampled, str(tmp_path / "sampled"))[0]
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    rows = RunFolder(tmp_path / "sampled").read_samples()
    assert [(row["step"], row["prompt"]) for row in rows] == [(step, name) for step in (1, 3, 4) for name in "ab"]
