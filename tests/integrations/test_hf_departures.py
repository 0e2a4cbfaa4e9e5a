"""A rank of lengthwise.Trainer that an error ends shows it, and the others raise at once and say which rank and why."""

import torch
import torch.distributed as dist

from tests.session import trainers

COMMON = {
    "eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1, "optim": "sgd",
    "gradient_accumulation_steps": 2, "max_steps": 2, "metric_for_best_model": "one_loss",
}  # fmt: skip
PLACES = ("on_epoch_end", "first of two metrics", "batch of an evaluation", "save_model", "stream")
"""Where a rank fails: the last rank, or the first, which alone writes, and reads streams."""
OF_FIRST = ("save_model", "stream")


def test_an_error_of_one_rank_is_its_own_and_names_it_on_the_other(ranks, tmp_path):
    first, last = ranks(2).run(ended_by_one_rank, tmp_path)
    for place in PLACES:
        failed, other = (first, last) if place in OF_FIRST else (last, first)
        assert failed[place] == f"OSError: {place} is broken", place
        rank = 0 if place in OF_FIRST else 1
        assert f"rank {rank} closed the run between two steps (OSError: {place} is broken)" in other[place], place


def ended_by_one_rank(folder):
    """By place: the error that ends the training of this rank."""
    errors = {}
    for place in PLACES:
        try:
            train_until(place, folder / place)
        except Exception as error:
            errors[place] = f"{type(error).__name__}: {error}"
    return errors


def train_until(place, folder):
    import transformers

    import lengthwise as lw

    def fail(at, *, rank=1):
        if place == at and dist.get_rank() == rank:
            raise OSError(f"{place} is broken")

    class Fails(transformers.TrainerCallback):
        def on_epoch_end(self, args, state, control, **others):
            assert state.global_step == 2
            fail("on_epoch_end")

    class Changed(lw.Trainer):
        def prediction_step(self, *args, **options):
            fail("batch of an evaluation")
            return super().prediction_step(*args, **options)

        def _save(self, *args, **options):
            fail("save_model", rank=0)
            return super()._save(*args, **options)

    def compute_metrics(found):
        fail("first of two metrics")
        return {}

    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            yield from rows[:1] * 4
            fail("stream", rank=0)

    rows = [row | {"labels": row["input_ids"]} for row in trainers.dataset(8)]
    evaluated = {"one": rows[:3], "two": Stream() if place == "stream" else rows[:3]}
    trainers.train(
        folder, COMMON, callbacks=[Fails], trainer_class=Changed, train_dataset=rows, eval_dataset=evaluated,
        compute_metrics=compute_metrics,
    )  # fmt: skip
