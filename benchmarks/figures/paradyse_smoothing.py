"""ParaDySe, smoothing: switches and time by gamma, and what kept buffers cost in length."""

from dataclasses import replace

import numpy as np
from paper_page import Figure, Row
from paper_paradyse import CLUSTER, DEGREE, LAYERS_RUN, METHODS, gpt, learned_costs, learned_run
from plots import Panel, picture

from lengthwise.core.pipeline_config import Method, uniform_scheme
from lengthwise.core.specs import ClusterSpec, cluster_preset
from lengthwise.cost.analytic.analytic_cost import AnalyticCost
from lengthwise.cost.analytic.volume import layer_volume
from lengthwise.cost.memory_model import DTYPE_BYTES
from lengthwise.cost.profiled.hybrid import HybridCost
from lengthwise.data.synthetic import synthetic_lengths

GAMMAS = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
SEQUENCES = 200
LENGTHS = {True: 329_728, False: 300_032}
"""Longest sequence of Table 5, with smoothing and without."""

BY_LENGTH = "ours smooths by length, ahead of the run, so that a choice does not depend on what came before"
LAST = "its rule: the method of the last input stays while it is within gamma; whole methods, no mixes by layer"


def sensitivity() -> Figure:
    """Switches between methods and time of a run by gamma, sorted and shuffled sequences."""
    drawn = synthetic_lengths("grch38", SEQUENCES, 0)
    orders = {"sorted": np.sort(drawn), "shuffled": drawn}
    switches, times_s = {}, {}
    for order, lengths in orders.items():
        runs = [learned_run(HybridCost, lengths, smoothing=gamma) for gamma in GAMMAS]
        switches[order] = [float(count) for _, _, count in runs]
        times_s[order] = [float(seconds.sum()) for _, seconds, _ in runs]
        kept = [_keeping_the_last(lengths, gamma) for gamma in GAMMAS]
        switches[f"{order}, last kept"] = [float(count) for count, _ in kept]
        times_s[f"{order}, last kept"] = [seconds for _, seconds in kept]
    loss = {order: [100 * (total / min(totals) - 1) for total in totals] for order, totals in times_s.items()}
    groups = [f"{gamma:.0%}" for gamma in GAMMAS]
    svg = picture(
        "ParaDySe, smoothing: switches and time by gamma, GPT-12288 on GRCh38",
        Panel(title=f"{SEQUENCES} sequences, one a step", x_title="gamma", y_title="switches of methods",
              bars=switches, groups=groups),
        Panel(title="time of all steps", x_title="gamma", y_title="over the least (%)", bars=loss, groups=groups),
    )  # fmt: skip
    paper = GAMMAS.index(0.05)
    freed, kept = _longest(kept=False), _longest(kept=True)
    rows = [
        Row(
            what=f"{order}: switches at gamma 0 / 5 % / 50 %", published="fewer with 5 %",
            ours=" / ".join(f"{switches[order][k]:.0f}" for k in (0, paper, -1)),
            why=LAST if order.endswith("kept") else BY_LENGTH,
        )
        for order in switches
    ]  # fmt: skip
    rows.append(
        Row(
            what="sorted: time that 5 % saves against 0", published="0.04 %",
            ours=f"{100 * (1 - times_s['sorted'][paper] / times_s['sorted'][0]):.2f} %",
            why="a switch itself costs nothing in the closed forms, noise of 2 % in what was learned decides",
        )
    )  # fmt: skip
    rows.append(
        Row(
            what="longest sequence, buffers of all methods kept over those of one",
            published=LENGTHS[False] / LENGTHS[True], ours=kept / freed, unit="x",
            why=f"{kept:,} against {freed:,} tokens; an upper bound, each at its longest; ours are freed",
        )
    )  # fmt: skip
    text = (
        "Methods chosen by costs learned from closed forms with 2 % of noise, as in Table 5's last rows. *Kept*: each "
        "method but the leanest leaves the buffers of one layer's communication, for the longest sequence it holds."
    )
    return Figure(svg=svg, rows=tuple(rows), text=text)


def _keeping_the_last(lengths: np.ndarray, gamma: float) -> tuple[int, float]:
    """Switches and seconds under ParaDySe's own rule, one method for all layers; what fits nowhere is left out."""
    cost, truth, schemes = learned_costs(HybridCost)
    limits = np.array([cost.max_tokens(scheme, num_devices=DEGREE) for scheme in schemes])
    lengths = lengths[lengths <= limits.max()]
    expected_s = np.stack([cost.sequence_times_s(lengths, scheme) + cost.overhead_s(scheme) for scheme in schemes])
    expected_s[lengths > limits[:, None]] = np.inf
    chosen: list[int] = []
    for times_s in expected_s.T:
        best = int(times_s.argmin())
        stays = bool(chosen) and times_s[chosen[-1]] <= (1 + gamma) * times_s[best]
        chosen.append(chosen[-1] if stays else best)
    seconds = sum(truth.time_s([int(length)], schemes[method]) for length, method in zip(lengths, chosen))
    return int(np.count_nonzero(np.diff(chosen))), float(seconds)


def _longest(*, kept: bool) -> int:
    """Most tokens of the leanest method, when the buffers of the others stay or are freed."""
    cluster = cluster_preset(CLUSTER)
    leanest = max(METHODS, key=lambda method: _max_tokens(cluster, method))
    others = (method for method in METHODS if method is not leanest)
    held = sum(_buffer_bytes(method, _max_tokens(cluster, method)) for method in others) if kept else 0
    device = replace(cluster.device, memory_bytes=int(cluster.device.memory_bytes - held))
    return _max_tokens(replace(cluster, device=device), leanest)


def _max_tokens(cluster: ClusterSpec, method: Method) -> int:
    scheme = uniform_scheme(LAYERS_RUN, degree=DEGREE, method=method)
    return AnalyticCost(model=gpt(), cluster=cluster).max_tokens(scheme, num_devices=DEGREE)


def _buffer_bytes(method: Method, length: int) -> float:
    """Bytes that a method communicates through: gathered weights of a layer, and Megatron's gathered input."""
    model = gpt()
    volume = layer_volume(model, method, degree=DEGREE, dtype="bfloat16")
    gathered = DTYPE_BYTES["bfloat16"] * model.hidden_size * length if method is Method.MEGATRON_TS else 0
    return volume.buffer_bytes + gathered
