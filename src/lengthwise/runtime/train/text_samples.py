"""Samples of text while a model is trained: prompts continued token by token, with the weights of the moment."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lengthwise.core.pipeline_config import WeightShard
from lengthwise.runtime.models.base import Transformer, run_eagerly
from lengthwise.runtime.state.sharded import ShardedState

LogitsOf = Callable[[Sequence[int]], Tensor]
"""From tokens to the logits [V] of the token after them."""


@dataclass(frozen=True, kw_only=True)
class TextSampling:
    """Which prompts are continued, when, and how tokens are chosen."""

    prompts: Sequence[tuple[str, tuple[int, ...]]]
    """Texts and their tokens, at least one each."""
    decode: Callable[[Sequence[int]], str]
    vocab_size: int
    """Ids below it have a meaning; others are never chosen."""
    eos_id: int | None
    """Ends a text."""
    every: int
    """Number of steps between samples; there are also some after the last step."""
    max_tokens: int
    """Most tokens of a continuation."""
    temperature: float
    """Of the softmax that tokens are drawn from; 0: the likeliest token is taken."""
    seed: int
    max_length: int = 0
    """Most tokens of a prompt with its continuation; 0: any."""

    def is_due(self, step: int, *, is_last: bool) -> bool:
        """Whether there are samples after ``step`` steps; ``is_last``: training ends with them, early or not."""
        return is_last or step % self.every == 0

    def rows(self, step: int, logits_of: LogitsOf) -> list[dict[str, Any]]:
        """Continuations of the prompts after ``step`` steps; changes no generator."""
        rows = []
        for number, (prompt, tokens) in enumerate(self.prompts):
            added = self._continue(tokens, logits_of, np.random.default_rng((self.seed, step, number)))
            rows.append({"step": step - 1, "prompt": prompt, "text": self.decode(added), "num_tokens": len(added)})
        return rows

    def _continue(self, prompt: tuple[int, ...], logits_of: LogitsOf, generator: np.random.Generator) -> list[int]:
        """Tokens that follow ``prompt``: each from a forward over the whole text so far."""
        chosen = list[int]()
        room = (self.max_length or len(prompt) + self.max_tokens) - len(prompt)
        while len(chosen) < min(self.max_tokens, room):
            logits_V = logits_of([*prompt, *chosen])[: self.vocab_size].double()
            token = int(logits_V.argmax())
            if self.temperature:
                shares_V = torch.softmax(logits_V / self.temperature, dim=0).cpu().numpy()
                token = int(generator.choice(len(shares_V), p=shares_V))
            if token == self.eos_id:
                break
            chosen.append(token)
        return chosen


@contextmanager
def predicting(model: Transformer, state: ShardedState) -> Iterator[LogitsOf | None]:
    """Within, predict next tokens with the weights of the moment on the first rank; None on others, which enter it too.

    The first rank is sent the whole weights and computes alone; weights do not change.
    """
    num_layers, others = len(model.layers), state.world.size - 1
    state.hold([WeightShard(first=0, end=num_layers, num_layers=num_layers), *[None] * others])
    state.pull()
    state.finish_pull()

    def logits_of(tokens: Sequence[int]) -> Tensor:
        head_VD, bias_V = model.output
        tokens_T = torch.tensor(tokens, dtype=torch.int64, device=head_VD.device)
        logits_1V = model.norm(model.hidden(tokens_T, (0, len(tokens_T)))[-1:]) @ head_VD.T
        return (logits_1V if bias_V is None else logits_1V + bias_V)[0]

    run_layer, model.run_layer = model.run_layer, run_eagerly  # layers are compiled for training alone
    try:
        with torch.no_grad():
            yield logits_of if state.world.is_first else None
    finally:
        model.run_layer = run_layer
