"""Evaluations by lengthwise.Trainer have the losses of one process on any number of ranks."""

import logging

import pytest
import transformers
from torch.utils.data import IterableDataset

from lengthwise.core.errors import InputError
from tests.session import evaluations, trainers

EXACT = 1e-12
SMOOTHED = 1e-6
"""transformers adds smoothed losses in float32."""


@pytest.mark.first_cells(2)
@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=[pytest.mark.deep] * (kind in ("trained", "only losses"))) for kind in evaluations.KINDS],
)
def test_an_evaluation_on_several_ranks_has_the_loss_of_transformers_on_one(kind, ranks, tmp_path):
    for rows_per_batch in (2,) if kind == "trained" else (2, 3):
        assert_evaluates_as_stock(kind, rows_per_batch, ranks, (3,) if rows_per_batch == 2 else (1, 2), tmp_path)


@pytest.mark.deep
@pytest.mark.parametrize("kind", evaluations.KINDS)
def test_an_evaluation_in_batches_of_any_size_has_the_loss_of_transformers_on_one(kind, ranks, tmp_path):
    for rows_per_batch in (1, 2, 3):
        assert_evaluates_as_stock(kind, rows_per_batch, ranks, (1, 2, 3), tmp_path)


def assert_evaluates_as_stock(kind, rows_per_batch, ranks, numbers_of_ranks, folder):
    tolerance = SMOOTHED if kind == "label smoothing" else EXACT
    stock = evaluations.evaluated(folder, kind, rows_per_batch, stock=True)
    assert stock["eval_loss"] > 0
    for num_ranks in numbers_of_ranks:
        for metrics in ranks(num_ranks).run(evaluations.evaluated, folder, kind, rows_per_batch):
            words = f"{num_ranks} ranks, batches of {rows_per_batch}"
            assert metrics == pytest.approx(stock, rel=tolerance), words


WORSE = {"learning_rate": 100.0, "max_steps": 3, "gradient_accumulation_steps": 2}
"""A training whose evaluations become worse, so that the first is the best, and patience is spent."""


class Stream(IterableDataset):
    def __iter__(self):
        yield from ({"input_ids": [1, 2, 3, row], "labels": [1, 2, 3, row]} for row in range(4))


@pytest.mark.parametrize(
    "evaluated",
    ["as transformers", *(pytest.param(k, marks=pytest.mark.deep) for k in ("by an override", "as a stream"))],
)
def test_a_resume_on_other_ranks_goes_on_with_the_best_loss_only_where_it_can_be_compared(
    evaluated, ranks, tmp_path, caplog
):
    options = {"is_overridden": evaluated == "by an override", "data": Stream() if evaluated == "as a stream" else None}
    [(_, best), _] = ranks(2).run(evaluations.best_of, tmp_path, WORSE, **options)
    assert best[0] == 1
    longer = WORSE | {"max_steps": 4, "gradient_accumulation_steps": 4}
    longer |= {"restore_callback_states_from_checkpoint": True}
    with caplog.at_level(logging.WARNING, "lengthwise"):
        begun, _ = evaluations.best_of(tmp_path, longer, **options, resume=str(tmp_path / "checkpoint-3"))
    [said] = [line for line in caplog.messages if "cannot be compared" in line] or [""]
    if evaluated == "as transformers":
        assert begun == (*best, 2) and not said
    else:
        assert begun == (0, None, 0)
        assert "resumed on 1 ranks from a checkpoint of 2" in said and "begin anew" in said
        assert ("eval_dataset is a stream" if evaluated == "as a stream" else "Own.prediction_step") in said


def test_rows_that_no_collator_makes_a_batch_of_are_refused_before_training(tmp_path):
    options = {"eval_strategy": "steps", "eval_steps": 1, "max_steps": 1, "per_device_eval_batch_size": 4}
    ragged = [{"input_ids": list(range(1, n)), "labels": list(range(1, n))} for n in (5, 9, 7)]
    as_rows = {"eval_dataset": ragged, "data_collator": transformers.default_data_collator}
    with pytest.raises(
        InputError, match=r"data_collator: it makes no batch of the first rows of eval_dataset \(ValueErr"
    ):
        trainers.train(tmp_path, options, **as_rows)
    with pytest.raises(InputError, match="data_collator: it makes no batch"):
        trainers.train(tmp_path, options, **as_rows | {"eval_dataset": {"one": ragged[:1], "all": ragged}})
    one_by_one = options | {"per_device_eval_batch_size": 1}
    assert trainers.train(tmp_path, one_by_one, **as_rows).state.global_step == 1
    assert trainers.train(tmp_path, options | {"eval_strategy": "no"}, **as_rows).state.global_step == 1


def test_evaluations_of_a_subclass_and_of_no_rows_are_not_tried(tmp_path):
    from torch.utils.data import DataLoader

    import lengthwise as lw

    class OneByOne(lw.Trainer):
        def get_eval_dataloader(self, eval_dataset=None):
            return DataLoader(self.eval_dataset, batch_size=1, collate_fn=transformers.default_data_collator)

    class Silent(lw.Trainer):
        def evaluate(self, *args, **options):
            return {}

    options = {"eval_strategy": "steps", "eval_steps": 1, "max_steps": 1, "per_device_eval_batch_size": 4}
    ragged = [{"input_ids": list(range(1, n)), "labels": list(range(1, n))} for n in (5, 9, 7)]
    as_rows = {"eval_dataset": ragged, "data_collator": transformers.default_data_collator}
    for kind in (OneByOne, Silent):
        assert trainers.train(tmp_path, options, trainer_class=kind, **as_rows).state.global_step == 1
