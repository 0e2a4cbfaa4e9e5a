"""Is a curriculum of rising length more stable at high learning-rates, over several epochs? Measured, not assumed.

    python benchmarks/stability.py [--rates 0.003 0.03] [--seeds 2 2] [--every 48] [--work DIR]

The model and corpus of convergence.py, three epochs, a learning-rate that suits and one ten times as high. Trainings
that are done are kept in the work folder. Writes stability.md and results/stability.json.
"""

import argparse
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from convergence import spread
from convergence_runs import FIRST_EPOCH, MAX_LENGTH, ORDERS, SIZES, Study, train
from pages import Section, say, write

from lengthwise.index.build import build_index
from lengthwise.index.settings import IndexSettings

EPOCHS = 3
ARMS = (*ORDERS, *FIRST_EPOCH)
RISE = 1.1
"""Ratio of a step's loss to the least loss before it that counts as unstable."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="*", type=int, default=(2, 2), help="how many, for each rate")
    parser.add_argument("--every", type=int, default=48, help="one document of so many is trained on")
    parser.add_argument("--rates", nargs="*", type=float, default=(0.003, 0.03))
    parser.add_argument("--work", type=Path, default=Path("outputs/benchmarks/stability"))
    options = parser.parse_args()
    index = options.work / "index"
    build_index(IndexSettings(source=None, train_bpe=1024), index, workers=1)
    trainings: dict[tuple[float, str], list[dict[str, Any]]] = {}
    counts = dict(zip(options.rates, options.seeds, strict=True))
    for seed, rate, order in product(range(max(options.seeds)), options.rates, ARMS):
        if seed >= counts[rate]:
            continue
        study = Study(
            index=str(index), every=options.every, tokens_per_step=8192, num_held_out=40, lr=rate, epochs=EPOCHS
        )
        curves = train(study, order, "none", seed, options.work / f"{order.replace(', ', '-')}-{rate:g}-{seed}.json")
        trainings.setdefault((rate, order), []).append(curves)
        print(rate, order, seed, curves["points"][-1], flush=True)
    steps = len(next(iter(trainings.values()))[0]["train"])
    first = (
        f"A Llama of {SIZES['num_hidden_layers']} layers of {SIZES['hidden_size']}, on one of {options.every} "
        f"documents of Python's standard library in pieces of at most {MAX_LENGTH:,} tokens; 8,192 tokens a step, "
        f"{EPOCHS} epochs, {steps} steps; seeds of weights and order; gradients clipped to a norm of 1."
    )
    write("stability", title="Order and stability at high rates", first=first, sections=[say(table(trainings))])


def table(trainings: dict[tuple[float, str], list[dict[str, Any]]]) -> Section:
    """Held-out losses, and how often and how far the training loss rises."""
    rows = []
    for (rate, order), curves in trainings.items():
        ratios = [loss_ratios(one["train"]) for one in curves]
        norms = [float(np.max(one["grad_norms"][10:])) for one in curves]
        ends = [[point["all"] for point in one["points"]] for one in curves]
        rows.append((
            f"{rate:g}", order, str(len(curves)), spread([losses[-1] for losses in ends]),
            spread([min(losses) for losses in ends]),
            spread([float((ratio > RISE).mean()) * 100 for ratio in ratios]),
            spread([float(ratio.max()) for ratio in ratios]), spread(norms),
        ))  # fmt: skip
    return Section(
        title="Held-out loss and unstable steps",
        text=(
            "Mean over seeds and its standard deviation. *Unstable*: steps after the tenth whose training loss is over "
            f"{RISE:g} times the least before it, in per cent, and the largest ratio. In a curriculum a step of longer "
            "sequences also has another loss, so that not every rise is one of the weights."
        ),
        head=(
            "rate",
            "order",
            "seeds",
            "loss at the end",
            "least",
            "unstable (%)",
            "largest ratio",
            "largest gradient norm",
        ),
        rows=rows,
    )  # fmt: skip


def loss_ratios(losses: Sequence[float]) -> np.ndarray:
    """Loss of each step after the tenth over the least of all before it."""
    values = np.array(losses)
    return values[10:] / np.minimum.accumulate(values)[9:-1]


if __name__ == "__main__":
    main()
