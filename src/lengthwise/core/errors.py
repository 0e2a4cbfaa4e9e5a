"""Errors a user can cause, each with the exit code the command line returns for it. Anything else is an ``assert``."""


class LengthwiseError(ValueError):
    """A user's mistake or a limit of the machine: shown without a traceback. The message names the way out."""

    exit_code = 1


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


_EXTRA_OF = {
    "torch": "train", "safetensors": "train", "transformers": "hf", "accelerate": "hf", "tokenizers": "data",
    "pyarrow": "data", "tensorboard": "tb", "wandb": "wandb", "sklearn": "learned",
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
