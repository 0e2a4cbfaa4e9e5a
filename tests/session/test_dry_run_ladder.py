"""The memory ladder's closed forms are what a dry run counts: all allocations of a step, as kernels of a GPU make them.

A CPU's kernels would keep other numbers: its attention has other log-sum-exps and workspaces. What layers keep is also
counted by hooks on saved tensors, on real ones (``tests/runtime/parallel/test_volume.py`` and ``test_ladder.py``).
"""

from dataclasses import replace

import pytest

from lengthwise.config.run_config import load
from lengthwise.core.pipeline_config import HEAD_GROUP_METHODS, WEIGHTS_OF, Method, PipelineConfig, WeightPlacement
from lengthwise.core.specs import cluster_preset, model_preset
from lengthwise.session.dry_run import PlanToRun, dry_run_plans
from tests.session.test_dry_run import plan_of

WITHIN = 0.02
"""Share by which the closed forms may be off: they have no tables, offsets or losses, and no order of pushes."""
TOKENS, TILE, NUM_LAYERS = 65_536, 4096, 2
ALL = (True,) * NUM_LAYERS
RUNGS = {
    "keep": {},
    "recompute": {"recompute": ALL},
    "selective": {"recompute": ALL, "keep_attention": True},
    "offload": {"offload": ALL},
    "recompute, offload": {"recompute": ALL, "offload": ALL},
    "selective, offload": {"recompute": ALL, "keep_attention": True, "offload": ALL},
    "tiles": {"tile_tokens": TILE},
    "recompute, tiles": {"recompute": ALL, "tile_tokens": TILE},
    "selective, tiles": {"recompute": ALL, "keep_attention": True, "tile_tokens": TILE},
    "offload, tiles": {"offload": ALL, "tile_tokens": TILE},
    "recompute, offload, tiles": {"recompute": ALL, "offload": ALL, "tile_tokens": TILE},
    "groups": {"head_groups": 4},
    "groups, tiles": {"head_groups": 4, "tile_tokens": TILE},
    "groups, selective": {"head_groups": 4, "recompute": ALL, "keep_attention": True},
    "groups, recompute, offload, tiles": {"head_groups": 4, "recompute": ALL, "offload": ALL, "tile_tokens": TILE},
}
LLAMA = replace(model_preset("llama-7b"), num_layers=NUM_LAYERS)
GROUPED = replace(model_preset("llama-3-8b"), num_layers=NUM_LAYERS, vocab_size=32_000)
"""Four query heads to a key/value head."""
WIDE = {"hidden_size": 4096, "ffn_size": 16_384, "num_heads": 32, "num_kv_heads": 32, "head_size": 128}
GPT = replace(model_preset("gpt-tiny"), num_layers=NUM_LAYERS, vocab_size=32_000, max_positions=TOKENS, **WIDE)
SETTINGS = {
    "llama, one device": (LLAMA, Method.DENSE),
    "gpt, one device": (GPT, Method.DENSE),
    "grouped queries, one device": (GROUPED, Method.DENSE),
    "llama, ulysses": (LLAMA, Method.ULYSSES),
    "grouped queries, ulysses_z": (GROUPED, Method.ULYSSES_Z),
    "llama, megatron_ts": (LLAMA, Method.MEGATRON_TS),
}
TOKENS_OF = {"grouped queries, ulysses_z": 2 * TOKENS}
"""Where weights are gathered, sums over two tiles of a rank are not all in float32 when tiles are fullest."""


def scheme_of(method, rung):
    degree = 1 if method is Method.DENSE else 8
    return PipelineConfig(
        degree=degree, stage_layers=(NUM_LAYERS,), methods=(method,) * NUM_LAYERS,
        weights=WEIGHTS_OF.get(method, WeightPlacement.WHOLE), **{"recompute": (False,) * NUM_LAYERS, **RUNGS[rung]},
    )  # fmt: skip


def ratios_of(setting):
    """Predicted over counted bytes at the peak of the first rank, by rung."""
    model, method = SETTINGS[setting]
    rungs = [rung for rung in RUNGS if "head_groups" not in RUNGS[rung] or method in HEAD_GROUP_METHODS]
    schemes = [scheme_of(method, rung) for rung in rungs]
    cluster, config = cluster_preset(f"1x{schemes[0].degree}xH100-80GB"), load(None, ["train.dtype=bfloat16"])
    runs = [
        PlanToRun(
            plan=plan_of((scheme, [[TOKENS_OF.get(setting, TOKENS)]])),
            model=model,
            cluster=cluster,
            config=config,
            ranks=(0,),
        )
        for scheme in schemes
    ]
    rows = [document["ranks"][0] for document in dry_run_plans(runs)]
    return {rung: row["predicted"]["peak_total_bytes"] / row["peak_total_bytes"] for rung, row in zip(rungs, rows)}


@pytest.mark.deep
@pytest.mark.parametrize("setting", SETTINGS)
def test_peaks_of_every_rung_are_within_two_percent_of_the_closed_forms(setting):
    ratios = ratios_of(setting)
    assert len(ratios) > 10
    assert all(abs(ratio - 1) <= WITHIN for ratio in ratios.values()), ratios
