"""One device, nothing shared: the operators of the one-device model."""

from lengthwise.runtime.models.operators import AttentionWeights, Dense, FfnWeights, Operators
from lengthwise.runtime.parallel.stage_shard import LayerStage


def operators(stage: LayerStage, attention: AttentionWeights, ffn: FfnWeights) -> Operators:
    """Make the one-device operators of one layer for one micro-batch."""
    return Dense(stage.view.view, stage.view.tables)
