"""Planning with the memory ladder beside planning without it: processor seconds of one core, as ratios.

python benchmarks/ladder_planning.py            # the table of ladder.md, some minutes
python benchmarks/ladder_planning.py --repeats 1 --devices 8
"""

import argparse
from itertools import product
from time import process_time
from unittest import mock

import numpy as np

from lengthwise.core.batch import GlobalBatch
from lengthwise.core.specs import cluster_preset, model_preset
from lengthwise.cost.analytic.analytic_cost import AnalyticCost
from lengthwise.data.synthetic import synthetic_lengths
from lengthwise.plan.planner import Planner
from lengthwise.plan.space import search_space as spaces
from lengthwise.plan.space.memory_ladder import OffloadMode

MODELS = ("llama-7b", "llama-3-8b")
CORPORA = ("commoncrawl", "githubcode")
DEVICES = (8, 64)
TOKENS_A_DEVICE = 16_384
SAMPLES = 16
SPACES = {
    "without": {"offload": OffloadMode.NONE, "tile_tokens": 0, "has_head_groups": False},
    "with": {},
}


def batches(corpus: str, num_devices: int, longest: int) -> list[tuple[int, ...]]:
    """Steps of so many tokens, in the order of the draw; sequences longer than ``longest`` are cut to it."""
    lengths = np.minimum(synthetic_lengths(corpus, 40_000, seed=1), longest)[1:]
    ends = np.searchsorted(np.cumsum(lengths), np.arange(1, SAMPLES + 2) * TOKENS_A_DEVICE * num_devices)
    steps = [tuple(part.tolist()) for part in np.split(lengths, ends)[: SAMPLES + 1] if len(part)]
    return [(longest, *steps[0]), *steps[1:]]  # a corpus has its longest sequence somewhere


def seconds(model_name: str, corpus: str, num_devices: int, name: str) -> tuple[float, int]:
    """Processor seconds from lengths to the first plan, and the schemes that plans choose among."""
    model, cluster = model_preset(model_name), cluster_preset(f"{num_devices // 8}x8xH100-80GB")
    longest = {"commoncrawl": 32_768, "githubcode": 131_072}[corpus]
    planned, *samples = batches(corpus, num_devices, longest)
    selective = spaces.selective_candidates if name == "with" else lambda *args, **options: ()
    begun_s = process_time()
    with mock.patch.object(spaces, "selective_candidates", selective):
        problem = spaces.make_problem(
            AnalyticCost(model=model, cluster=cluster), cluster=cluster, num_layers=model.num_layers,
            max_length=longest, search_space=spaces.SearchSpace(**SPACES[name]),
            samples=[np.array(sample) for sample in samples],
        )  # fmt: skip
        Planner(policy="auto", problem=problem)(GlobalBatch(step=0, ids=tuple(range(len(planned))), lengths=planned))
    return process_time() - begun_s, len(problem.candidates)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--devices", default=",".join(map(str, DEVICES)))
    asked = parser.parse_args()
    print("| model | corpus | H100s | schemes without, with | seconds with / without |\n" + "| --- " * 5 + "|")
    for setting in product(MODELS, CORPORA, map(int, asked.devices.split(","))):
        measured = [[seconds(*setting, name) for name in SPACES] for _ in range(asked.repeats)]
        without_s, with_s = (min(times[place][0] for times in measured) for place in (0, 1))
        counts = ", ".join(f"{count:,}" for _, count in measured[0])
        print(f"| {setting[0]} | {setting[1]} | {setting[2]} | {counts} | {with_s / without_s:.2f} |", flush=True)


if __name__ == "__main__":
    main()
