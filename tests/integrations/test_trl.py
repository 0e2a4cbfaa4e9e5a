"""trl's SFTConfig and SFTTrainer, by classes that extend transformers' as they do; trl itself is not needed."""

from dataclasses import dataclass

import numpy as np
import pytest

from lengthwise.core.errors import InputError
from tests.session import trainers
from tests.session.test_prepare import assert_equal_weights


def sft_config(folder, **options):
    """Arguments of a class like trl.SFTConfig: fields of its own, and other defaults of inherited ones."""
    import transformers

    @dataclass
    class SFTConfig(transformers.TrainingArguments):
        logging_steps: float = 10
        gradient_checkpointing: bool = True
        max_length: int | None = 1024
        truncation_mode: str = "keep_start"
        packing: bool = False
        dataset_text_field: str = "text"
        completion_only_loss: bool | None = None
        assistant_only_loss: bool = False
        loss_type: str | None = None
        activation_offloading: bool = False

        def __post_init__(self):
            super().__post_init__()
            self.loss_type = self.loss_type or "chunked_nll"

    SFTConfig.__module__ = "trl.trainer.sft_config"
    plain = trainers.arguments(folder).to_dict()
    given = {"per_device_train_batch_size", "gradient_accumulation_steps", "learning_rate", "lr_scheduler_type"}
    given |= {"max_grad_norm", "train_sampling_strategy", "save_strategy", "report_to", "use_cpu", "max_steps"}
    return SFTConfig(output_dir=str(folder), **({name: plain[name] for name in given} | options))


def trained(folder, rows, **options):
    import lengthwise as lw

    trainers.as_started_by_torchrun()
    model = trainers.gpt2()
    args = sft_config(folder, **options)
    lw.Trainer(model=model, args=args, train_dataset=rows, lengthwise=trainers.planned()).train()
    return trainers.weights_of(model)


def test_rows_are_trained_under_its_arguments_and_cut_at_its_max_length(tmp_path):
    rows = trainers.dataset()
    cut = [{name: column[:9] for name, column in row.items()} for row in rows]
    assert any(len(row["input_ids"]) > 9 for row in rows)
    expected = trainers.train(tmp_path, {}, train_dataset=cut)
    assert_equal_weights(trained(tmp_path, rows, max_length=9), trainers.weights_of(expected.model))
    whole = trained(tmp_path, rows)
    assert any(not np.allclose(whole[name], weight) for name, weight in trainers.weights_of(expected.model).items())


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"packing": True}, "packing=True: sequences are packed by plan; set packing=False"),
        ({"loss_type": "dft"}, "loss_type='dft': the loss is the model's own"),
        ({"activation_offloading": True}, "activation_offloading=True: memory is planned"),
        ({"truncation_mode": "keep_end"}, "truncation_mode='keep_end': rows are cut at their end"),
        ({"assistant_only_loss": True}, "assistant_only_loss=True: items have neither assistant_masks nor labels"),
    ],
)
def test_what_would_be_ignored_is_refused_with_what_to_do(tmp_path, options, named):
    rows = [{"input_ids": row["input_ids"]} for row in trainers.dataset()]
    with pytest.raises(InputError, match=named):
        trained(tmp_path, rows, **options)


def test_its_trainer_is_told_to_hand_over_what_it_has_prepared(tmp_path):
    import transformers

    import lengthwise as lw

    class SFTTrainer(transformers.Trainer):
        def training_step(self, *args, **options):
            return super().training_step(*args, **options)

    SFTTrainer.__module__ = "trl.trainer.sft_trainer"

    class Planned(lw.Trainer, SFTTrainer):
        pass

    trainer = Planned(model=trainers.gpt2(), args=trainers.arguments(tmp_path), train_dataset=trainers.dataset())
    with pytest.raises(InputError, match=r"hand over what it has: lengthwise\.Trainer\(model=sft\.model"):
        trainer.train()


def test_a_training_step_of_ones_own_is_told_where_its_parts_go(tmp_path):
    import lengthwise as lw

    class Own(lw.Trainer):
        def training_step(self, *args, **options):
            return super().training_step(*args, **options)

    trainer = Own(model=trainers.gpt2(), args=trainers.arguments(tmp_path), train_dataset=trainers.dataset())
    with pytest.raises(InputError, match=r"Own\.training_step: .* goes into lengthwise=\{'loss': .* into a callback"):
        trainer.train()
