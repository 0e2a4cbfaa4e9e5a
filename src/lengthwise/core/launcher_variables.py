"""The variables of the environment by which a launcher tells a process which of how many ranks it is."""

import os

from lengthwise.core.errors import InputError
from lengthwise.core.wording import whole_number

NUMBERS, LOCAL_RANK, MEETING_PLACE = ("RANK", "WORLD_SIZE"), "LOCAL_RANK", ("MASTER_ADDR", "MASTER_PORT")
PROCESSES = {"OMPI_COMM_WORLD_SIZE": "mpirun", "PMI_SIZE": "mpirun", "SLURM_STEP_NUM_TASKS": "srun"}
"""How many processes other launchers have started, by the variable in which they say so."""


def has_rank() -> bool:
    """Whether this process is one of several ranks, or the only one, of torchrun or who sets what torchrun sets."""
    return all(name in os.environ for name in NUMBERS)


def rank_and_size() -> tuple[int, int]:
    """The rank of this process and the number of ranks; 0 of 1 where nobody started ranks.

    Raises:
        InputError: the variables contradict one another, or others say that this process is one of several.
    """
    if not has_rank():
        _check_alone()
        return 0, 1
    values = ", ".join(f"{name}={os.environ[name]}" for name in NUMBERS)
    rank, size, local_rank = (whole_number(os.environ.get(name, "0")) for name in (*NUMBERS, LOCAL_RANK))
    if rank is None or not size or rank >= size or local_rank is None:
        local = f", {LOCAL_RANK}={os.environ[LOCAL_RANK]}" if LOCAL_RANK in os.environ else ""
        raise InputError(
            f"{values}{local}: ranks are numbers from 0 to below how many there are; start them with torchrun, or "
            "unset these variables"
        )
    if missing := [name for name in MEETING_PLACE if not os.environ.get(name)]:
        raise InputError(
            f"{values} are set, as for ranks that torchrun starts, and {' and '.join(missing)} not, by which ranks "
            f"find one another; start ranks with torchrun, or unset {' and '.join(NUMBERS)}"
        )
    return rank, size


def _check_alone() -> None:
    """Raise ``InputError`` where another launcher started several processes, each of which would train alone."""
    for name, launcher in PROCESSES.items():
        if (whole_number(os.environ.get(name, "")) or 0) > 1:
            raise InputError(
                f"{launcher} started {os.environ[name]} of these processes ({name}), and each would train by itself, "
                f"as {' and '.join(NUMBERS)} are not set; start one process a machine that runs torchrun, or set "
                f"{', '.join((*NUMBERS, LOCAL_RANK, *MEETING_PLACE))} from {launcher}'s variables"
            )
