"""ParaDySe, random forest: how much each feature decides."""

from dataclasses import replace

import numpy as np
from paper_page import Figure, Row
from paper_paradyse import CLUSTER, DEGREE, METHODS, NOISE
from plots import Panel, picture
from sklearn.ensemble import RandomForestRegressor

from lengthwise.core.pipeline_config import uniform_scheme
from lengthwise.core.specs import cluster_preset, model_preset
from lengthwise.cost.analytic.analytic_cost import AnalyticCost

MODELS = (("bert-1024", 24), ("llama-7b", 32), ("llama-66b", 8), ("gpt-12288", 8))
LENGTHS = tuple(int(length) for length in np.geomspace(1024, 131_072, 22))
FEATURES = ("length", "hidden size", "heads", "layers", *map(str, METHODS))
TARGETS = ("seconds", "bytes")
NUM_TREES, DEPTH, SEED = 50, 10, 42
"""Of the paper's forests."""


def importance() -> Figure:
    """Importance of the features of one forest over all models and methods, and its error without one of them."""
    rows_x, seconds, peaks = _profile()
    bars, rows = {}, []
    for target, values in zip(TARGETS, (seconds, peaks)):
        forest = _forest(rows_x, values)
        bars[target] = (100 * forest.feature_importances_).tolist()
        places = [place for place, name in enumerate(FEATURES) if name != "layers"]
        whole, without = (_error(rows_x[:, columns], values) for columns in (range(len(FEATURES)), places))
        rows.append(
            Row(
                what=f"median error of unseen {target}: with layers / without", published="not given",
                ours=f"{whole:.1%} / {without:.1%}",
                why="its code leaves the number of layers out of the features, where hidden size stands in for it",
            )
        )  # fmt: skip
        first = max(zip(bars[target], FEATURES))
        rows.append(
            Row(
                what=f"what decides the {target} most", published="not given", ours=f"{first[1]} ({first[0]:.0f} %)",
                why="the paper tracks importance and prints none",
            )
        )  # fmt: skip
    svg = picture(
        "ParaDySe, random forest: importance of features",
        Panel(
            title=f"{NUM_TREES} trees of depth {DEPTH}, four models, four methods", x_title="feature",
            y_title="importance (%)", bars=bars, groups=FEATURES,
        ),
        columns=1,
    )  # fmt: skip
    text = (
        f"One forest over {len(rows_x)} profiles: closed forms, {NOISE:.0%} of noise, logarithms of targets; errors on "
        "every fifth length, left out of training. The paper grows one a method, without the four last features."
    )
    return Figure(svg=svg, rows=tuple(rows), text=text)


def _profile() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """[rows, features], and the logarithms of seconds and bytes of a micro-batch of one sequence."""
    rng = np.random.default_rng(SEED)
    rows, seconds, peaks = [], [], []
    for preset, num_layers in MODELS:
        model = replace(model_preset(preset), num_layers=num_layers, causal=False)
        cost = AnalyticCost(model=model, cluster=cluster_preset(CLUSTER))
        for number, method in enumerate(METHODS):
            scheme = uniform_scheme(num_layers, degree=DEGREE, method=method)
            for length in LENGTHS:
                rows.append(
                    [length, model.hidden_size, model.num_heads, num_layers, *np.eye(len(METHODS))[number].tolist()]
                )
                seconds.append(cost.time_s([length], scheme))
                peaks.append(float(cost.peak_bytes(length, scheme, num_devices=DEGREE)))
    noise = NOISE * rng.standard_normal((2, len(rows)))
    return np.array(rows), np.log(seconds) + noise[0], np.log(peaks) + noise[1]


def _forest(rows: np.ndarray, target: np.ndarray) -> RandomForestRegressor:
    return RandomForestRegressor(n_estimators=NUM_TREES, max_depth=DEPTH, random_state=SEED).fit(rows, target)


def _error(rows: np.ndarray, target: np.ndarray) -> float:
    """Median relative error of the lengths left out."""
    left_out = np.isin(rows[:, 0], LENGTHS[2::5])
    predicted = _forest(rows[~left_out], target[~left_out]).predict(rows[left_out])
    return float(np.median(np.abs(np.expm1(predicted - target[left_out]))))
