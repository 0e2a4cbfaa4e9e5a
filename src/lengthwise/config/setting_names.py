"""How ``prepare`` and ``lengthwise.Trainer`` spell the settings that errors name."""

from typing import get_args

from lengthwise.config.choices import OptimizerName
from lengthwise.config.prepare_options import PrepareOptions
from lengthwise.core.errors import Setting

OTHER_MEANING = frozenset({"objective", "cost", "workers"})
"""Settings whose name means something else in ``prepare``; both say so."""
MODEL_WORDS = {Setting.MODEL: "model", Setting.HF: "from_pretrained", Setting.DTYPE: "the dtype of the model"}
"""What stands for settings of the model where Python code makes it."""


class OptionSpelling:
    """Spells settings as options of ``prepare``."""

    def __call__(self, setting: Setting) -> str:
        """The option that means the setting, or that only configurations have it."""
        return MODEL_WORDS.get(setting) or _option(setting) or _elsewhere(setting)

    def assign(self, setting: Setting, value: str) -> str:
        """The option with a value: ``recompute='none'``."""
        is_code = _option(setting) is None or (setting is Setting.OPTIMIZER and value not in get_args(OptimizerName))
        return f"{self(setting)}={value if is_code or value.startswith('<') else _literal(value, quote=_SINGLE)}"


as_option = OptionSpelling()


def _option(setting: Setting) -> str | None:
    """The name of the option of ``prepare`` that means the same; None: there is none."""
    name = "optimizer" if setting is Setting.OPTIMIZER else setting.value.rpartition(".")[2]
    return name if name in PrepareOptions.model_fields and name not in OTHER_MEANING else None


def _elsewhere(setting: Setting) -> str:
    return f"{setting.value} (of configurations alone)"


class TrainerSpelling:
    """Spells settings as arguments of ``lengthwise.Trainer``, its own and ``TrainingArguments``."""

    def __call__(self, setting: Setting) -> str:
        """The argument that means the setting, or that only configurations have it."""
        if (name := MODEL_WORDS.get(setting) or _ARGUMENTS.get(setting)) is not None:
            return name
        option = _option(setting)
        return _elsewhere(setting) if option is None else f'lengthwise={{"{option}": ...}}'

    def assign(self, setting: Setting, value: str) -> str:
        """The argument with a value: ``optim="adamw_torch"`` for the optimizer adamw."""
        if setting is Setting.OPTIMIZER:
            if value in _OPTIMIZERS:
                return f'{self(setting)}="{_OPTIMIZERS[value]}"'
            named = f'"{value}"' if value in get_args(OptimizerName) else value  # else a class or a function
            return f'lengthwise={{"optimizer": {named}}}'
        said = self(setting)
        if said.endswith(": ...}"):
            return f"{said.removesuffix('...}')}{_literal(value)}}}"
        return f"{said}={_literal(value)}" if said.isidentifier() else f"{said}={value}"


as_trainer_argument = TrainerSpelling()
_ARGUMENTS = {
    Setting.OPTIMIZER: "optim",
    Setting.LR: "learning_rate",
    Setting.CLIP_NORM: "max_grad_norm",
    Setting.STEPS: "max_steps",
    Setting.SEQUENCES_PER_STEP: "per_device_train_batch_size x gradient_accumulation_steps x ranks",
    Setting.ORDER: "train_sampling_strategy",
    Setting.COMPILE: "torch_compile",
    Setting.DEVICE: "use_cpu",
    Setting.POLICY: "policy",
}
"""Settings that are arguments of the trainer, or of its ``TrainingArguments``."""
_OPTIMIZERS = {"adamw": "adamw_torch", "sgd": "sgd"}
_SINGLE = "'"
_WORDS = {"true": "True", "false": "False", "null": "None"}


def _literal(value: str, quote: str = '"') -> str:
    """A value of a message as Python code."""
    try:
        float(value)
    except ValueError:
        return _WORDS.get(value, f"{quote}{value}{quote}")
    return value
