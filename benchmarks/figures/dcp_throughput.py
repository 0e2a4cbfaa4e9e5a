"""DCP, Figures 4, 8 and 9: imbalance of bucket parallel, throughput on three corpora, and weak scaling."""

import numpy as np
from as_published import bucket_run, recomputing_groups
from contests import setting
from paper_dcp import AS_PUBLISHED, LENGTHS, MODELS, Comparison, against_bucket
from paper_page import Figure, Row
from plots import Panel, picture

from lengthwise.core.batch import GlobalBatch
from lengthwise.core.specs import model_preset
from lengthwise.data.synthetic import IMAGES, VIDEOS

DATASETS, SEQUENCES, CONCENTRATION = 140, 40_000, 0.3
SIZES = (8, 16, 32, 64)
TOKENS_PER_DEVICE = 54_000
"""Of weak scaling: the longest sequence is a step of 8 GPUs."""
FIXED = (4, 8, 16)
"""Sequence parallel sizes of bucket parallel as published."""
STEPS = 10
WAITS = "each step waits for the slowest of as many groups as there are"


def imbalance() -> Figure:
    """Figure 4: idle share of bucket parallel on mixtures of the published lengths."""
    model = "transformer-1d-5b"
    _, entry = setting(
        model, "dcp-short", gpus=32, steps=1, device="H200-141GB", memory_gib=80, policies=("bucket",),
        search_space=AS_PUBLISHED,
    )  # fmt: skip
    assert entry.problem is not None
    lengths = np.array([length for length, _ in (*IMAGES, *VIDEOS)])
    edges = np.arange(0, 101, 10)
    bars, rows = {}, []
    for degree in (4, 8, 16):
        groups = recomputing_groups(entry.problem, degree, model_preset(model).num_layers)
        assert groups is not None
        idles = []
        for seed in range(DATASETS):
            rng = np.random.default_rng(seed)
            shares = rng.dirichlet(np.full(len(lengths), CONCENTRATION)) / lengths
            drawn = rng.choice(lengths, SEQUENCES, p=shares / shares.sum()).tolist()
            batch = GlobalBatch(step=0, ids=tuple(range(SEQUENCES)), lengths=tuple(drawn))
            idles.append(100 * bucket_run(entry.problem, groups, [batch], rounds=1).idle)
        bars[f"SP {degree}"] = np.histogram(idles, edges)[0].tolist()
        low, middle, high = np.quantile(idles, [0.25, 0.5, 0.75])
        rows.append(
            Row(
                what=f"imbalance ratio of {DATASETS} data sets, quartiles, SP {degree}", published="figure only",
                ours=f"{low:.0f} % / {middle:.0f} % / {high:.0f} %",
                why="its data sets are not given; ours are random mixtures of the lengths of its public benchmark",
            )
        )  # fmt: skip
    svg = picture(
        "DCP, Figure 4: imbalance of bucket parallel on 140 data sets, Transformer-1D on 32 H200s",
        Panel(
            title="one degree, one micro-batch a group and step", x_title="idle share of a step, up to (%)",
            y_title="data sets", bars=bars, groups=[f"{edge}" for edge in edges[1:]],
        ),
        columns=1,
    )  # fmt: skip
    text = f"Data set k draws its share of tokens for each of {len(lengths)} lengths from a Dirichlet distribution."
    return Figure(svg=svg, rows=tuple(rows), text=text)


def _speeds(compared: Comparison) -> dict[str, float]:
    """Tokens per second of every system."""
    fixed = {f"bucket, SP {p}": run.tokens_per_s for p, run in compared.fixed.items() if p in FIXED}
    tuned = {"bucket, tuned": compared.speeds["bucket"]} if "bucket" in compared.speeds else {}
    return {**fixed, **tuned, **{name: compared.speeds[name] for name in ("dcp-inter", "dcp-intra")}}


def _idles(compared: Comparison) -> dict[str, float]:
    """Idle share of a step of every system, per cent."""
    planned = {one.policy: one.idle for one in compared.result.ranked}
    fixed = {f"bucket, SP {p}": 100 * run.idle for p, run in compared.fixed.items() if p in FIXED}
    rest = {"bucket, tuned": "bucket", "dcp-inter": "dcp-inter", "dcp-intra": "dcp-intra"}
    return {**fixed, **{name: 100 * planned[policy] for name, policy in rest.items() if policy in planned}}


def throughput() -> Figure:
    """Figure 8: throughput and idle share of both models on three corpora."""
    panels, rows = [], []
    for model, (intra, inter) in MODELS.items():
        compared = [against_bucket(model, lengths, steps=STEPS) for lengths in LENGTHS]
        for title, unit, values in (
            ("throughput", "K tokens/s, 32 GPUs", [_speeds(one) for one in compared]),
            ("imbalance", "idle share of a step (%)", [_idles(one) for one in compared]),
        ):
            scale = 1000 if title == "throughput" else 1
            bars = {name: [each[name] / scale if name in each else None for each in values] for name in values[0]}
            panels.append(Panel(title=f"{model}: {title}", x_title="corpus", y_title=unit, bars=bars, groups=LENGTHS))
        for name, published in (("dcp-inter", inter), ("dcp-intra", intra)):
            for degree in FIXED if published else ():
                gain = max(one.speeds[name] / one.fixed[degree].tokens_per_s for one in compared)
                rows.append(
                    Row(
                        what=f"{model}: {name} over bucket parallel at SP {degree}, the best of three corpora",
                        published=published, ours=gain, unit="x",
                        why="the degree of its baseline is not given, and the gain is that of the degree",
                    )
                )  # fmt: skip
        gains = [one.speeds["dcp-intra"] / one.recomputing for one in compared if one.recomputing]
        rows.append(
            Row(
                what=f"{model}: dcp-intra over dcp-inter that recomputes every layer, three corpora",
                published=f"{intra / inter:.2f}x" if intra and inter else "figure only",
                ours=f"{min(gains):.2f}x to {max(gains):.2f}x",
                why="a forward again is up to a third more; its two gains are each the best of several corpora",
            )
        )  # fmt: skip
    svg = picture("DCP, Figure 8: throughput and imbalance on 32 H200s of 80 GB, simulated", *panels)
    text = (
        "Bucket parallel as published at three degrees, which forms batches itself and counts full ones alone; "
        "and tuned over degrees, batch sizes and recompute on the sampler's steps, as both DCP policies; more in "
        "the [published tables](../benchmarks/paper_tables.md#dcp-section-42-speed-ups-on-32-h200s-with-80-gb-each)."
    )
    return Figure(svg=svg, rows=tuple(rows), text=text)


def weak_scaling() -> Figure:
    """Figure 9: tokens per second of both models from 8 to 64 GPUs."""
    panels, rows = [], []
    for model in MODELS:
        speeds = {
            gpus: _speeds(
                against_bucket(model, "dcp-balanced", gpus=gpus, steps=STEPS, tokens_per_device=TOKENS_PER_DEVICE)
            )
            for gpus in SIZES
        }
        names = ("bucket, SP 8", "bucket, tuned", "dcp-inter", "dcp-intra")
        lines = {name: [(gpus, speeds[gpus][name] / 1000) for gpus in SIZES if name in speeds[gpus]] for name in names}
        panels.append(Panel(title=model, x_title="GPUs", y_title="K tokens/s", lines=lines, dots=lines))
        for name in names:
            first, last = lines[name][0], lines[name][-1]
            rows.append(
                Row(
                    what=f"{model}: {name}, tokens/s per GPU on {last[0]} GPUs over {first[0]}",
                    published="near 1 (near-linear)" if name.startswith("dcp") else "decays",
                    ours=f"{last[1] / last[0] / (first[1] / first[0]):.2f}",
                    why=WAITS if "SP" in name else "the links of more nodes cost, larger steps are easier to balance",
                )
            )  # fmt: skip
    svg = picture("DCP, Figure 9: weak scaling, corpus dcp-balanced, H200s of 80 GB, simulated", *panels)
    return Figure(svg=svg, rows=tuple(rows), text=f"{TOKENS_PER_DEVICE:,} tokens a GPU and step.")
