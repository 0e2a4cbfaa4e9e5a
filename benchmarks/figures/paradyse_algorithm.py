"""ParaDySe, Algorithm 1 as printed beside the exact optimum: methods of the layers of one stage."""

from dataclasses import replace

import numpy as np
from paper_page import Figure, Row
from paper_paradyse import CLUSTER, DEGREE, LAYERS_RUN, METHODS
from plots import Panel, picture
from published import layer_methods

from lengthwise.core.pipeline_config import uniform_scheme
from lengthwise.core.specs import cluster_preset, model_preset
from lengthwise.cost.analytic.analytic_cost import AnalyticCost
from lengthwise.plan.layerwise.layer_assignment import best_counts

INSTANCES = 400
LAYERS = (8, 96)
EDGES = (-np.inf, 1e-9, 0.01, 0.02, 0.05, 0.1, np.inf)
NAMES = ("0", "≤1 %", "≤2 %", "≤5 %", "≤10 %", ">10 %")
SIZES = tuple(range(8192, 330_000, 8192))


def excess() -> Figure:
    """Time over the optimum on random instances, and on GPT by length."""
    bars, rows = {}, []
    for resets, words in ((False, "as printed"), (True, "each k from the start")):
        for num_layers in LAYERS:
            over = np.array([_over(seed, num_layers, resets=resets) for seed in range(INSTANCES)])
            bars[f"{words}, {num_layers}"] = (100 * np.histogram(over, EDGES)[0] / INSTANCES).tolist()
            rows.append(
                Row(
                    what=f"{words}, over the optimum, {INSTANCES} random instances, {num_layers} layers: mean / worst",
                    published="almost optimal", ours=f"+{over.mean():.2%} / +{over.max():.1%}",
                    why=f"optimal in {(over < EDGES[1]).mean():.0%}; " + WHY[resets],
                )
            )  # fmt: skip
    length_ratios = _gpt_ratios()
    worst = max(length_ratios, key=lambda pair: pair[1])
    rows.append(
        Row(
            what=f"the same for GPT-12288, {LAYERS_RUN} layers, by length: worst", published="almost optimal",
            ours=f"+{worst[1] - 1:.2%} at {worst[0]:.0f}K tokens",
            why="four methods and eight layers leave few mixes to miss",
        )
    )  # fmt: skip
    svg = picture(
        "ParaDySe, Algorithm 1 as printed over the exact optimum",
        Panel(
            title="random times and bytes, by layers", x_title="time over the optimum",
            y_title="instances (%)", bars=bars, groups=NAMES,
        ),
        Panel(
            title=f"GPT-12288, {LAYERS_RUN} layers, closed forms", x_title="length (K tokens)",
            y_title="time over the optimum (x)", lines={"as printed, GPT": length_ratios}, zero=False,
        ),
    )  # fmt: skip
    text = (
        "Algorithm 1 and the exact counts of our planner on the same seconds and bytes of a layer. Random: five "
        "methods, log-uniform within a factor of four, faster ones larger; budgets between leanest and largest."
    )
    return Figure(svg=svg, rows=tuple(rows), text=text)


WHY = (
    "from the second k on, layers of the first method are gone, so few pairs are ever tried",
    "all pairs are tried, and few mixes of three methods are better",
)


def _over(seed: int, num_layers: int, *, resets: bool) -> float:
    rng = np.random.default_rng(seed)
    times_s = np.sort(np.exp(rng.uniform(0, np.log(4), 5)))
    num_bytes = np.sort(np.exp(rng.uniform(0, np.log(4), 5)))[::-1]
    budget = num_layers * float(rng.uniform(num_bytes.min(), num_bytes.max()))
    return _ratio(times_s, num_bytes, num_layers, budget, resets=resets) - 1


def _ratio(
    times_s: np.ndarray, num_bytes: np.ndarray, num_layers: int, budget: float, *, resets: bool = False
) -> float:
    counts = best_counts(times_s.tolist(), num_bytes.tolist(), num_layers=num_layers, budget_bytes=budget)
    assert counts is not None, "no method fits"
    theirs = layer_methods(times_s.tolist(), num_bytes.tolist(), num_layers=num_layers, budget=budget, resets=resets)
    return sum(float(times_s[m]) for m in theirs) / float(times_s @ counts)


def _gpt_ratios() -> list[tuple[float, float]]:
    model = replace(model_preset("gpt-12288"), num_layers=LAYERS_RUN, causal=False)
    cluster = cluster_preset(CLUSTER)
    cost = AnalyticCost(model=model, cluster=cluster)
    schemes = [uniform_scheme(LAYERS_RUN, degree=DEGREE, method=method) for method in METHODS]
    ratios = []
    for length in SIZES:
        peaks = np.array([cost.peak_bytes(length, scheme, num_devices=DEGREE) for scheme in schemes])
        times_s = np.array([cost.time_s([length], scheme) for scheme in schemes])
        if peaks.min() <= cluster.device.memory_bytes:
            budget = float(cluster.device.memory_bytes)
            ratios.append((length / 1024, _ratio(times_s / LAYERS_RUN, peaks / LAYERS_RUN, LAYERS_RUN, budget)))
    return ratios
