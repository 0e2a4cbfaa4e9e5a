"""How ``prepare`` spells the settings that errors name."""

from lengthwise.config.prepare_options import PrepareOptions
from lengthwise.core.errors import Setting

OTHER_MEANING = frozenset({"objective", "cost", "workers"})
"""Settings whose name means something else in ``prepare``; both say so."""


def as_option(setting: Setting) -> str:
    """Spell a setting as an option of ``prepare``, or say that only configurations have it."""
    name = "optimizer" if setting is Setting.OPTIMIZER else setting.value.rpartition(".")[2]
    has_option = name in PrepareOptions.model_fields and name not in OTHER_MEANING
    return name if has_option else f"{setting.value} (of configurations alone)"
