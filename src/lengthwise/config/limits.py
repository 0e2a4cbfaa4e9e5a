"""Limits and defaults that settings and the code behind them share."""

import math
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from lengthwise.core.lengths import MOST_TOKENS
from lengthwise.core.lr_scaling import MAX_LR_FACTOR
from lengthwise.core.specs import MAX_DEVICES
from lengthwise.core.wording import parse_tokens

MAX_CONFIG_BYTES = 256 << 10
MAX_TEXT = 4096
"""Characters of a setting."""
MAX_STEPS = 10_000_000
MAX_EPOCHS = 100_000
MAX_SEQUENCES = 1 << 31
MOST_BLOCKS = 1024
"""Stages of a pacing, and groups by difficulty."""
WINDOW = 4096
"""Sequences that ``windowed`` sorts at a time, unless it is told otherwise."""
DEFAULT_TRAIN_STEPS = 100
"""Optimizer steps of `lengthwise train` where neither steps nor epochs are set."""
DEFAULT_TOKENS_PER_STEP = 65_536
"""Token budget of a global batch where neither budget is set."""


def _count_of(value: Any) -> Any:
    """The number that text such as 32K means; whatever else is given is checked later."""
    number = parse_tokens(value) if isinstance(value, str) else None
    return value if number is None else number


NumTokens = Annotated[int, BeforeValidator(_count_of), Field(ge=1, le=MOST_TOKENS)]
NumSequences = Annotated[int, Field(ge=1, le=MAX_SEQUENCES)]
NumSteps = Annotated[int, Field(ge=1, le=MAX_STEPS)]
StepsOrNone = Annotated[int, Field(ge=0, le=MAX_STEPS)]
NumEpochs = Annotated[int, Field(ge=1, le=MAX_EPOCHS)]
ModelSize = Annotated[int, Field(ge=1, le=1 << 24)]
NumDevices = Annotated[int, Field(ge=1, le=MAX_DEVICES)]
Beta = Annotated[float, Field(ge=0, lt=1)]
LrFactor = Annotated[float, Field(ge=0, le=MAX_LR_FACTOR)]
LearningRate = Annotated[float, Field(gt=0, le=1000)]
ClipNorm = Annotated[
    float, Field(ge=0, le=1e9), BeforeValidator(lambda norm: 0.0 if norm is None or norm == math.inf else norm)
]
