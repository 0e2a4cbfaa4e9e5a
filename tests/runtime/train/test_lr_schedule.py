import pytest

from lengthwise.config.run_config import OptimConfig
from lengthwise.runtime.train.lr_schedule import learning_rate


def rates(num_steps=10, **optim):
    config = OptimConfig(lr=1.0, **optim)
    return [learning_rate(config, step, num_steps) for step in range(num_steps)]


def test_warm_up_rises_to_the_full_rate():
    assert rates(warmup_steps=4, schedule="constant")[:5] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_schedules_start_at_the_full_rate_and_end_at_the_least(schedule):
    values = rates(schedule=schedule, min_lr_fraction=0.1)
    assert values[0] == pytest.approx(1.0)
    assert values[-1] == pytest.approx(0.1)
    assert values == sorted(values, reverse=True)


def test_one_step_is_a_schedule_too():
    assert rates(num_steps=1) == [1.0]
