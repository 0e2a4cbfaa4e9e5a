"""Does the order of lengths, or a learning-rate that follows the batch, change what is learned? Measured, not assumed.

    python benchmarks/convergence.py [--quick] [--seeds 3] [--every 24] [--scalings none sqrt linear] [--work DIR]

A small Llama on the demo's corpus, every training on the same sequences, each once, in batches of the same token
budget: shuffled against a curriculum of rising length, each with the learning-rate as scheduled, and scaled to the
sequences of each batch by the two published rules. Trainings that are done are kept in the work folder. Writes
convergence.md, results/convergence.json and docs/internals/convergence.svg.
"""

import argparse
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from convergence_runs import CLAMP, LONG, MAX_LENGTH, ORDERS, SCALINGS, SIZES, Study, train
from pages import Section, say, write

from lengthwise.index.build import build_index
from lengthwise.index.settings import IndexSettings
from lengthwise.report.charts.lines import LineStyle, Series, line_chart

FIGURE = Path(__file__).parent.parent / "docs" / "internals" / "convergence.svg"
STYLE = (
    ":root{--ink:#16191d;--soft:#555c66;--rule:#dfe3e8;--paper:#ffffff;--s0:#0072b2;--s1:#d55e00;--s2:#00875f;"
    "--s3:#a8467f;--s4:#9a6b00;--s5:#6b7280}@media(prefers-color-scheme:dark){:root{--ink:#e9ebee;--soft:#a7afba;"
    "--rule:#30363e;--paper:#14171b;--s0:#58aef0;--s1:#ff8f52;--s2:#38c79d;--s3:#e592c4;--s4:#e2b53f;--s5:#a9b1bd}}"
    "text{font:12px system-ui,'DejaVu Sans',sans-serif;fill:var(--soft)}.key{fill:var(--ink);font-size:13px}"
    "svg{overflow:visible}.axis-title{fill:var(--ink)}.grid{stroke:var(--rule);stroke-width:1}.line{fill:none;stroke-width:2;"
    "vector-effect:non-scaling-stroke;stroke-linecap:round;stroke-linejoin:round}"
    + "".join(f".s{k}{{stroke:var(--s{k})}}.k{k}{{fill:var(--s{k})}}" for k in range(6))
)
Found = dict[tuple[str, str], list[dict[str, Any]]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one seed, a tenth of the tokens; for a look")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--every", type=int, default=24, help="one document of so many is trained on")
    parser.add_argument("--scalings", nargs="*", default=SCALINGS, choices=SCALINGS)
    parser.add_argument("--work", type=Path, default=Path("outputs/benchmarks/convergence"))
    options = parser.parse_args()
    seeds, every = (1, options.every * 10) if options.quick else (options.seeds, options.every)
    index = options.work / "index"
    build_index(IndexSettings(source=None, train_bpe=1024), index, workers=2)
    study = Study(index=str(index), every=every, tokens_per_step=8192, num_held_out=40, lr=3e-3)
    found = train_all(study, list(product(ORDERS, options.scalings)), range(seeds), options.work)
    first = (
        f"A Llama of {SIZES['num_hidden_layers']} layers of {SIZES['hidden_size']}, on one of {every} documents of "
        f"Python's standard library in pieces of at most {MAX_LENGTH:,} tokens; {study.tokens_per_step:,} tokens a "
        f"step, one epoch; {seeds} seeds of weights and order. Factors of the learning-rate count sequences, relative "
        f"to a batch of mean lengths, and stay within {CLAMP[0]:g} to {CLAMP[1]:g}."
        + (" **A quick run.**" if options.quick else "")
    )
    write("convergence", title="Order, learning-rate and what is learned", first=first, sections=[say(table(found))])
    FIGURE.write_text(figure(found))


def train_all(study: Study, arms: Sequence[tuple[str, str]], seeds: Iterable[int], work: Path) -> Found:
    """Trainings by order and scaling, two at a time."""
    found: Found = {}
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        going = {
            (*arm, seed): pool.submit(train, study, *arm, seed, work / f"{arm[0]}-{arm[1]}-{seed}.json")
            for seed, arm in product(seeds, arms)
        }
        for (order, scaling, seed), future in going.items():
            found.setdefault((order, scaling), []).append(future.result())
            print(order, scaling, seed, future.result()["points"][-1], flush=True)
    return found


def table(found: Found) -> Section:
    """Held-out losses at the end, and half-way."""
    rows = []
    for (order, scaling), trainings in found.items():
        ends = [training["points"][-1] for training in trainings]
        half = [training["points"][len(training["points"]) // 2] for training in trainings]
        factors = [factor for training in trainings for factor in training["factors"]]
        rows.append((
            order, scaling, *(spread([end[name] for end in ends]) for name in ("all", "near", "far")),
            spread([one["all"] for one in half]), f"{min(factors):.2f} to {max(factors):.2f}",
        ))  # fmt: skip
    return Section(
        title="Loss of held-out documents",
        text=(
            f"Mean over seeds and its standard deviation. *First*: the first {LONG} tokens of each document; *later*: "
            "the ones after. All trainings see the same tokens, each sequence once."
        ),
        head=("order", "rate", "at the end", "first", "later", "half-way", "factors"),
        rows=rows,
    )


def spread(values: list[float]) -> str:
    """Mean and standard deviation."""
    return f"{mean(values):.3f}" + (f" ± {stdev(values):.3f}" if len(values) > 1 else "")


def figure(found: Found) -> str:
    """The curves as one picture that needs no page: mean over seeds of the held-out loss over tokens."""
    series = []
    for (order, scaling), trainings in found.items():
        points = zip(*(training["points"] for training in trainings))
        means = tuple((float(held[0]["tokens"]), mean(one["all"] for one in held)) for held in points)
        series.append(Series(name=f"{order}, rate {scaling}", points=means[1:]))
    style = LineStyle(x_title="tokens trained", y_title="held-out loss (nats per token)", height=300)
    chart = line_chart(series, label="Held-out loss over tokens trained", style=style)
    assert chart is not None, "two evaluations at least"
    key = "".join(
        f'<rect x="{60 + 250 * (k % 3)}" y="{14 + 22 * (k // 3)}" width="12" height="12" class="k{k}"/>'
        f'<text x="{78 + 250 * (k % 3)}" y="{25 + 22 * (k // 3)}" class="key">{one.name}</text>'
        for k, one in enumerate(series)
    )
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" width="860" height="450" viewBox="0 0 860 450">'
        f'<style>{STYLE}</style><rect width="100%" height="100%" style="fill:var(--paper)"/>{key}'
        f'<svg x="70" y="66" width="760" height="380" style="overflow:visible">{chart.svg}</svg></svg>\n'
    )


if __name__ == "__main__":
    main()
