"""What can be said to prepare is checked at once, before anything is computed."""

import pytest

import lengthwise as lw
from lengthwise.config.optimizer_settings import OptimizerSettings
from lengthwise.config.prepare_options import read_options
from lengthwise.config.run_config import check
from lengthwise.core.errors import InputError
from tests.session import models


def test_every_mistake_is_named_at_once_with_the_nearest_name():
    with pytest.raises(InputError) as refused:
        read_options({"polcy": "auto", "steps": 0, "policy": "fastest", "max_degre": 2, "weight_decay": -1})
    message = str(refused.value)
    assert "polcy: no such option; did you mean policy?" in message
    assert "max_degre: no such option; did you mean max_degree?" in message
    assert "steps: Input should be greater than or equal to 1, not 0" in message
    assert "policy: Input should be 'padded'" in message
    assert "weight_decay: Input should be greater than or equal to 0, not -1" in message


def test_a_number_out_of_range_is_not_told_to_be_a_function():
    with pytest.raises(InputError) as refused:
        read_options({"lr": -1})
    assert str(refused.value).splitlines()[1:] == ["  lr: Input should be greater than 0, not -1"]
    with pytest.raises(InputError, match="loss: Input should be callable"):
        read_options({"loss": 3})


def test_options_that_contradict_each_other_are_refused():
    with pytest.raises(InputError, match="form_batches: the policy auto takes batches as they come"):
        read_options({"form_batches": True, "policy": "auto"})
    with pytest.raises(InputError, match=r"plan\.form_batches: the policy packed takes batches as they come"):
        check({"plan": {"form_batches": True, "policy": "packed"}})


def test_a_mistake_is_found_before_the_corpus_is_read():
    class Unread:
        def __len__(self):
            raise AssertionError("read")

    with pytest.raises(InputError, match=r"learning_rate: no such option; did you mean lr\?"):
        lw.prepare(models.gpt(), Unread(), learning_rate=1e-3)
    with pytest.raises(InputError, match=r"batch_size: no such option; did you mean sequences_per_step\?"):
        lw.prepare(models.gpt(), Unread(), batch_size=8)


def test_what_cannot_price_is_no_cost_model():
    with pytest.raises(InputError, match=r"cost: .*dict is no cost model: it lacks sequence_times_s, overhead_s"):
        read_options({"cost": {"time": 1}})
    cost = models.mixed_cost()
    assert read_options({"cost": cost}).cost is cost


def test_an_optimizer_is_a_name_or_its_constants():
    assert read_options({"optimizer": "sgd", "weight_decay": 0.0}).optimizer_settings == OptimizerSettings(
        name="sgd", weight_decay=0.0
    )
    settings = OptimizerSettings(name="adamw", betas=(0.8, 0.9))
    assert read_options({"optimizer": settings}).optimizer_settings is settings


def test_a_step_has_one_budget():
    assert read_options({}).budgets == {"tokens_per_step": 65_536}
    assert read_options({"sequences_per_step": 8}).budgets == {"tokens_per_step": None, "sequences_per_step": 8}
    with pytest.raises(InputError, match=r"set exactly one of tokens_per_step and sequences_per_step; 2 of them"):
        lw.prepare(models.gpt(), models.rows(), tokens_per_step=100, sequences_per_step=8)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"policy": "atuo"}, "auto"), ({"policy": "dcp-inta"}, "dcp-intra"), ({"recompute": "slective"}, "selective"),
        ({"over_length": "spilt"}, "split"), ({"order": "curiculum"}, "curriculum"), ({"optimizer": "adamv"}, "adamw"),
        ({"packing": "allways"}, "always"), ({"objective": "maskd"}, "masked"), ({"device": "cdua"}, "cuda"),
        ({"pacing": "linaer"}, "linear"), ({"lr_scaling": "sqr"}, "sqrt"),
    ],
)  # fmt: skip
def test_a_mistyped_word_is_told_the_nearest(options, word):
    with pytest.raises(InputError, match=f"did you mean {word}\\?"):
        read_options(options)


def test_a_list_of_one_may_be_that_one():
    teacher = models.gpt()
    assert read_options({"frozen": teacher}).frozen == [teacher]
    options = read_options({"loss_columns": "advantages", "methods": "ring", "frozen": (teacher, teacher)})
    assert (options.loss_columns, options.methods) == (("advantages",), ("ring",)) and len(options.frozen) == 2


@pytest.mark.parametrize("frozen", [5, None, [5], {"teacher": models.gpt()}])
def test_what_is_no_model_cannot_be_frozen(frozen):
    with pytest.raises(InputError, match=r"frozen: .* is no torch\.nn\.Module"):
        read_options({"frozen": frozen})
