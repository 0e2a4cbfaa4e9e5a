"""Plans made by hand and executed as they are: <2,1> beside two <1,1>, at the next step two <1,2>; four CPU ranks.

python examples/02_any_strategy_at_any_step.py [FOLDER]
"""

import json
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from lengthwise.config.run_config import check
from lengthwise.core.batch import GlobalBatch, Pack
from lengthwise.core.pipeline_config import Method, uniform_scheme
from lengthwise.core.run_folder import RunFolder
from lengthwise.core.step_plan import Pipeline, PlannedMicroBatch, StepPlan
from lengthwise.data.corpus import open_corpus
from lengthwise.session.planning import make_sampler
from lengthwise.session.trained_model import resolve_model

folder = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())


def lengthwise(*arguments: object) -> None:
    subprocess.run([sys.executable, "-m", "lengthwise", *map(str, arguments)], check=True)


lengthwise("index", Path(__file__).resolve().parents[1] / "docs", "--out", folder / "index")
data = {"index": str(folder / "index"), "max_length": 1024, "over_length": "split", "tokens_per_step": 6_000}
config = check({"data": data, "train": {"steps": 4, "dtype": "float64"}, "run_folder": str(folder / "run")})
config.save(folder / "run.yaml")
layers = resolve_model(config, corpus := open_corpus(config.data)).num_layers
NO_TIMES = dict.fromkeys(("update_s", "time_s", "lower_bound_s"), 0.0)
alone, shared = uniform_scheme(layers), uniform_scheme(layers, degree=2, method=Method.METP)
staged = uniform_scheme(layers, stages=2)
STRATEGIES = [[(shared, (0, 1)), (alone, (2,)), (alone, (3,))], [(staged, (0, 1)), (staged, (2, 3))]]


def plan(batch: GlobalBatch) -> StepPlan:
    """The longest sequences first, each to the pipeline with the fewest tokens a device."""
    pipelines = [(scheme, ranks, list[PlannedMicroBatch]()) for scheme, ranks in STRATEGIES[batch.step % 2]]
    for length, sequence in sorted(zip(batch.lengths, batch.ids), reverse=True):
        held = min(pipelines, key=lambda p: sum(m.pack.num_tokens for m in p[2]) / len(p[1]))[2]
        held.append(PlannedMicroBatch(pack=Pack(ids=(sequence,), lengths=(length,)), time_s=0.0, peak_bytes=0))
    done = tuple(Pipeline(scheme=s, ranks=r, micro_batches=tuple(held)) for s, r, held in pipelines)
    return StepPlan(step=batch.step, policy="hand", pipelines=done, loss_normaliser=batch.num_targets, **NO_TIMES)


plans = [plan(batch) for _, batch in zip(range(config.train.steps), make_sampler(config, corpus))]
(folder / "plans.jsonl").write_text("".join(json.dumps(plan.to_json()) + "\n" for plan in plans))
lengthwise("train", folder / "run.yaml", "--plan", folder / "plans.jsonl", "--nproc", 4)
lengthwise("report", folder / "run")
for step, timeline in RunFolder(folder / "run").read_timelines().items():
    for rank in range(4):
        spent = Counter[str]()
        for span in sorted(s for s in timeline.spans if s.rank == rank):
            spent[span.name] += round(1000 * span.duration_s)
        print(f"step {step} rank {rank}: {', '.join(f'{name} {ms} ms' for name, ms in spent.items() if ms > 9)}")
