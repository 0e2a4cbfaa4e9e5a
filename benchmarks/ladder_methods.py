"""Which method and which rung of the memory ladder are the cheapest for one sequence, 1K to 10M tokens: simulated.

python benchmarks/ladder_methods.py                  # Llama-3-8B, all eight GPUs of a node share the sequence
python benchmarks/ladder_methods.py --nodes 4

ParaDySe asks which method suits which length. Here every method is priced with every rung: layers that are recomputed
and offloaded, feed-forwards in tiles, and where nothing else fits, the optimizer's state on the host.
"""

import argparse
from dataclasses import replace

import numpy as np

from lengthwise.core.pipeline_config import Method, uniform_scheme
from lengthwise.core.specs import cluster_preset, model_preset
from lengthwise.cost.analytic.analytic_cost import AnalyticCost
from lengthwise.plan.space.candidate import Candidate, make_candidates
from lengthwise.plan.space.memory_ladder import FASTER, LEANER, MIXED, TILE_TOKENS, Rung

LENGTHS = (1_000, 10_000, 50_000, 100_000, 200_000, 500_000, 1_000_000, 2_000_000, 4_000_000, 10_000_000)
RECOMPUTED = tuple(Rung(recomputed=eighths / 8, offloaded=0) for eighths in range(9))


def step_s(candidate: Candidate, length: int) -> float:
    """Seconds of a step of one sequence alone; inf where it does not fit."""
    if candidate.max_tokens < length:
        return np.inf
    return float(candidate.times_s(np.array([length]))[0]) + candidate.overhead_s + candidate.update_s


def name_of(candidate: Candidate) -> str:
    """Method, then layers recomputed and offloaded, tokens of a tile, and the state where it is on the host."""
    host = " + state on host" if candidate.cost.state_on_host else ""  # type: ignore[attr-defined]
    return candidate.scheme.name.partition(" ")[2] + host


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="llama-3-8b")
    parser.add_argument("--nodes", type=int, default=1)
    asked = parser.parse_args()
    model, cluster = model_preset(asked.model), cluster_preset(f"{asked.nodes}x8xH100-80GB")
    cluster = replace(cluster, device=cluster.device.with_margin())
    num_devices, methods = cluster.num_devices, [method for method in Method if method is not Method.DENSE]
    candidates: list[Candidate] = []
    for on_host in (False, True):
        cost = AnalyticCost(model=model, cluster=cluster, state_on_host=on_host)
        schemes = [
            rung.of(uniform_scheme(model.num_layers, degree=num_devices, method=method), tile_tokens=TILE_TOKENS)
            for method in methods
            for rung in (*RECOMPUTED, *FASTER, *MIXED, *LEANER)
        ]
        candidates += make_candidates(schemes, cost, num_devices=num_devices)
    print("| tokens | cheapest | seconds | tokens/s | METP: cheapest rung | x the cheapest |\n" + "| --- " * 6 + "|")
    for length in LENGTHS:
        best = min(candidates, key=lambda candidate: step_s(candidate, length))
        of_metp = [candidate for candidate in candidates if candidate.scheme.methods[0] is Method.METP]
        metp = min(of_metp, key=lambda candidate: step_s(candidate, length))
        best_s, metp_s = step_s(best, length), step_s(metp, length)
        if best_s == np.inf:
            print(f"| {length:,} | does not fit | | | | |")
            continue
        words = f"{name_of(metp)} | {metp_s / best_s:.2f}" if metp_s < np.inf else "does not fit |"
        print(f"| {length:,} | {name_of(best)} | {best_s:,.2f} | {length / best_s:,.0f} | {words} |")


if __name__ == "__main__":
    main()
