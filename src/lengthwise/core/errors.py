"""Errors a user can cause, each with the exit code the command line returns for it. Anything else is an ``assert``.

A message names settings by :class:`Setting`, such as ``f"lower {Setting.MAX_LENGTH}"``. Whoever shows the error spells
them as its users do: as keys of a configuration, options of a command, keyword arguments or ``TrainingArguments``.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from enum import StrEnum

_MARKED = re.compile(r"⟦([a-z_.*]+)⟧(?:=(<\w+>|[\w+-]+(?:\.[\w+-]+)*))?")
"""A setting, and the value that is to be given to it."""


class Setting(StrEnum):
    """The settings that errors name, by their keys in a configuration."""

    MIXTURE = "data.mixture"
    VALIDATION = "data.validation"
    VALIDATION_SHARE = "data.validation_share"
    MAX_LENGTH = "data.max_length"
    OVER_LENGTH = "data.over_length"
    TOKENS_PER_STEP = "data.tokens_per_step"
    SEQUENCES_PER_STEP = "data.sequences_per_step"
    ORDER = "data.order"
    WINDOW = "data.window"
    PACING_START = "data.pacing_start"
    PACING_STAGES = "data.pacing_stages"
    CURRICULUM_EPOCHS = "data.curriculum_epochs"
    MODEL = "model.*"
    """All that says which model is trained."""
    HF = "model.hf"
    IMPLEMENTATION = "model.implementation"
    CLUSTER = "cluster.name"
    POLICY = "plan.policy"
    MAX_DEGREE = "plan.max_degree"
    MAX_STAGES = "plan.max_stages"
    METHOD = "plan.method"
    METHODS = "plan.methods"
    RECOMPUTE = "plan.recompute"
    OFFLOAD = "plan.offload"
    OFFLOAD_STATE = "train.offload_state"
    SHARD_GRADIENTS = "plan.shard_gradients"
    HOST_MEMORY_GIB = "cluster.host_memory_gib"
    MAX_TOKENS = "plan.max_tokens"
    BATCH_SIZE = "plan.batch_size"
    SHAPES = "plan.shapes"
    SLICES = "plan.slices"
    COST = "plan.cost"
    PROFILE = "plan.profile"
    OPTIMIZER = "optim.name"
    LR = "optim.lr"
    LR_REFERENCE = "optim.lr_reference"
    LR_CLAMP = "optim.lr_clamp"
    CLIP_NORM = "optim.clip_norm"
    MOMENTUM = "optim.momentum"
    STEPS = "train.steps"
    DEVICE = "train.device"
    DTYPE = "train.dtype"
    COMPILE = "train.compile"
    TIMEOUT_S = "train.timeout_s"

    def __str__(self) -> str:
        """Mark the place of a message where whoever shows it spells the setting."""
        return f"⟦{self.value}⟧"

    def __format__(self, spec: str) -> str:
        return str(self)


def as_key(setting: Setting) -> str:
    """Spell a setting as configurations do; also as ``prepare`` does where its user's own loop may meet the error."""
    if setting is Setting.MODEL:
        return "settings model.*"
    return f"{setting.value} (timeout_s= of prepare)" if setting is Setting.TIMEOUT_S else setting.value


class LengthwiseError(ValueError):
    """A user's mistake or a limit of the machine: shown without a traceback. The message names the way out.

    Attributes:
        what: the thing that is refused, such as ``"sequence 17"``; empty where the message alone says it.
        value: what it takes, in ``unit``; None: the error is not one of numbers.
        limit: the most there is, in ``unit``.
        unit: ``"tokens"``, ``"bytes"``, ``"devices"`` or ``"files"``.
    """

    exit_code = 1
    spell: Callable[[Setting], str] = staticmethod(as_key)
    """How ``str`` spells settings; whoever shows the error to users of something else than configurations sets it."""

    def __init__(
        self, *args: object, what: str = "", value: float | None = None, limit: float | None = None, unit: str = ""
    ) -> None:
        super().__init__(*args)
        self.what, self.value, self.limit, self.unit = what, value, limit, unit

    def with_message(self, message: str) -> "LengthwiseError":
        """Return an error of the same numbers and exit code with another message, such as a longer one."""
        other = copy(self)
        other.args = (message,)
        return other

    @property
    def marked(self) -> str:
        """The message with its settings still marked, to be part of another error's."""
        return str(self.args[0]) if self.args else ""

    @property
    def remedies(self) -> tuple[Setting, ...]:
        """The settings that the message names, in its order."""
        return tuple(Setting(match[1]) for match in _MARKED.finditer(self.marked))

    def spelt(self, spell: Callable[[Setting], str]) -> str:
        """The message with its settings spelt by ``spell``; one with a method ``assign`` spells values that follow."""
        assign: Callable[[Setting, str], str] = getattr(
            spell, "assign", lambda setting, value: f"{spell(setting)}={value}"
        )

        def of_match(match: re.Match[str]) -> str:
            setting = Setting(match[1])
            return spell(setting) if match[2] is None else assign(setting, match[2])

        return _MARKED.sub(of_match, self.marked)

    def __str__(self) -> str:
        return self.spelt(self.spell)


@contextmanager
def errors_spelt(spell: Callable[[Setting], str]) -> Iterator[None]:
    """Have errors spell settings by ``spell``; around a block, or as the decorator of a function."""
    try:
        yield
    except LengthwiseError as error:
        error.spell = spell
        raise


class InputError(LengthwiseError):
    """A path, a corpus, a configuration or a file that cannot be used as given."""

    exit_code = 2


class MissingPackage(InputError, ImportError):  # noqa: N818 - says what is the matter
    """A package that an extra installs, and that is not there."""


class InfeasibleError(LengthwiseError):
    """A sequence, a pack or a batch that fits on no device under any allowed scheme."""

    exit_code = 3


class CheckError(LengthwiseError):
    """Something that should agree does not: ranks, digests, a plan and its batch."""

    exit_code = 4


class CommunicationError(LengthwiseError):
    """A rank did not come to a collective within the time limit, or is gone; another try may go well."""


INTERRUPTED = 130
"""The exit code after Ctrl-C."""


class Preempted(LengthwiseError):  # noqa: N818 - an outcome, not a fault
    """The run was asked to stop (SIGTERM), saved itself and can be resumed."""

    exit_code = 75

    def __init__(self, message: str, *, by_signal: bool = False) -> None:
        """``by_signal``: to a process, which says nothing of others that go on; not by a file, which is for all."""
        super().__init__(message)
        self.by_signal = by_signal


_EXTRA_OF = {
    "torch": "train", "safetensors": "train", "transformers": "hf", "accelerate": "hf", "tokenizers": "data",
    "pyarrow": "data", "tensorboard": "tb", "wandb": "wandb", "trackio": "trackio", "mlflow": "mlflow",
    "sklearn": "learned",
}  # fmt: skip
"""Packages that are not dependencies, and the extra that installs each."""


def missing_package(user: str, package: str) -> MissingPackage:
    """The error that ``user`` needs ``package``, which may be a module of it, and the command that installs it."""
    name = package.partition(".")[0]
    wanted = f"lengthwise[{_EXTRA_OF[name]}]" if name in _EXTRA_OF else name
    return MissingPackage(f"{user} needs {name}, which is not installed: pip install '{wanted}'")


def first_line(error: BaseException) -> str:
    """The first line of what an error of another package says, for a message of one sentence."""
    return (str(error).splitlines() or [type(error).__name__])[0][:300]
