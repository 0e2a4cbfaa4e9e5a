"""What a process knows of the ranks that it is one of."""

import pytest

from lengthwise.core.errors import InputError
from lengthwise.core.launcher_variables import rank_and_size

PLACE = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.fixture
def variables(monkeypatch):
    def given(**values):
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", *PLACE, "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS"):
            monkeypatch.delenv(name, raising=False)
        for name, value in values.items():
            monkeypatch.setenv(name, value)

    return given


def test_a_launcher_says_which_rank_a_process_is(variables):
    variables(RANK="1", WORLD_SIZE="2", LOCAL_RANK="1", **PLACE)
    assert rank_and_size() == (1, 2)
    variables(SLURM_STEP_NUM_TASKS="1", SLURM_NTASKS="8")  # a shell that may start eight
    assert rank_and_size() == (0, 1)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"RANK": "1", "WORLD_SIZE": "2"}, "RANK=1, WORLD_SIZE=2 are set, .* MASTER_ADDR and MASTER_PORT not"),
        ({"RANK": "x", "WORLD_SIZE": "2", **PLACE}, "RANK=x, WORLD_SIZE=2: ranks are numbers"),
        ({"RANK": "2", "WORLD_SIZE": "2", **PLACE}, "from 0 to below"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "a", **PLACE}, "LOCAL_RANK=a: ranks are numbers"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, r"mpirun started 2 of these processes \(OMPI_COMM_WORLD_SIZE\), .*torchrun"),
        ({"SLURM_STEP_NUM_TASKS": "16"}, "srun started 16 of these processes"),
    ],
)
def test_variables_that_contradict_one_another_or_leave_out_ranks_are_refused(variables, values, words):
    variables(**values)
    with pytest.raises(InputError, match=words):
        rank_and_size()
