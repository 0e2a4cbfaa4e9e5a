"""ParaDySe's whole loop on real ranks: profile, learned costs, a method per layer and length, training under a limit.

One sequence a step, from short to long, as in its Figure 2: the policy ``paradyse`` beside each method alone, all under
the same learned costs and the same memory limit, each up to the longest sequence that it holds. The limit is what METP,
the leanest, needs for three quarters of the longest sequence. Sides take turns; seconds are medians over rounds.

    python benchmarks/paradyse.py [--rounds 3] [--longest 4096] [--sequences 24] [--work DIR]
"""

import argparse
import shutil
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import numpy as np
from pages import Section, say, write

from lengthwise.cli.commands import index, profile
from lengthwise.cli.train_config import launch
from lengthwise.config.run_config import Config, load
from lengthwise.core.pipeline_config import Method, uniform_scheme
from lengthwise.core.run_folder import RunFolder
from lengthwise.core.specs import cluster_preset
from lengthwise.core.wording import GIB
from lengthwise.cost.separable import SeparableCost
from lengthwise.data.corpus import open_corpus
from lengthwise.data.synthetic import synthetic_lengths
from lengthwise.session.planning import make_cost
from lengthwise.session.trained_model import resolve_model

RANKS = 2
DRAWN = 4000
"""Sequences of a corpus, of which more are trained the longer they are."""
LAYERS = 4
MODELS = ("gpt-tiny", "llama-tiny", "bert-tiny")
CORPORA = ("githubcode", "grch38")
METHODS = (Method.MEGATRON_TS, Method.MEGATRON_CZ, Method.ULYSSES_Z, Method.METP)
ALL = "paradyse"
PUBLISHED = {
    ("bert-tiny", "githubcode"): "Published for BERT: up to 89.29 % less time at the longest sequence",
    ("bert-tiny", "grch38"): "Published for BERT: up to 58.01 % less time",
    ("gpt-tiny", "githubcode"): "Published for GPT: sequences up to 144.16 % longer",
    ("gpt-tiny", "grch38"): "Published for GPT: sequences up to 181.22 % longer",
}


@dataclass
class Side:
    """What one policy or method does with one model and corpus."""

    name: str
    reach: int
    """Tokens of the longest sequence that fits under the limit, by the learned costs."""
    times_s: dict[int, list[float]] = field(default_factory=dict)
    """Of every step, a time for each round."""
    methods: Counter[str] = field(default_factory=Counter)
    """Layers that ran each method, over all sequences."""

    def seconds(self, num_sequences: int) -> float:
        """Of the first sequences, the shortest ones, but for the very first: a process calls all for the first time."""
        return sum(median(self.times_s[step]) for step in range(1, num_sequences))


def make_corpus(name: str, work: Path, *, count: int, longest: int) -> Path:
    """An index of ``count`` of many lengths like those of a corpus: the longest, the second, ... the shortest."""
    ranks = np.unique(np.geomspace(1, DRAWN, count).round().astype(int))
    drawn = np.sort(np.sort(synthetic_lengths(name, DRAWN, 0))[-ranks]).astype(float)
    lengths = np.maximum(48, np.round(drawn * longest / drawn[-1])).astype(int)
    texts, out = work / f"{name}-texts", work / f"{name}-index"
    if not out.exists():
        texts.mkdir(parents=True)
        for number, length in enumerate(lengths):
            (texts / f"{number:03}.txt").write_text(("the longest sequences are few. " * length)[: length - 1])
        index.run(texts, out=out)
    return out


def settings(model: str, corpus: Path, work: Path) -> list[str]:
    """Of every run with a model and corpus."""
    return [
        f"model.preset={model}", f"model.num_layers={LAYERS}", f"data.index={corpus}", "data.order=corpus",
        "data.sequences_per_step=1", "train.epochs=1", "train.dtype=float32", "train.timeline=false",
        "plan.policy=paradyse", "plan.cost=hybrid", f"plan.profile={work / f'{model}.json'}", "plan.recompute=none",
        f"plan.methods=[{','.join(METHODS)}]", f"plan.degree={RANKS}", f"cluster.name={RANKS}xcpu",
    ]  # fmt: skip


def cost_within(config: Config, memory_gib: float | None) -> SeparableCost:
    """The learned costs of a run on devices with so much memory."""
    spec = resolve_model(config, open_corpus(config.data))
    return make_cost(config, spec, cluster_preset(f"{RANKS}xcpu", memory_gib=memory_gib))


def reach_of(cost: SeparableCost, method: Method) -> int:
    """Most tokens of a sequence that all layers compute by one method."""
    return cost.max_tokens(uniform_scheme(LAYERS, degree=RANKS, method=method), num_devices=RANKS)


def limit_gib(config: Config, tokens: int) -> float:
    """Memory of a device that METP fills with a sequence of ``tokens``."""
    scheme = uniform_scheme(LAYERS, degree=RANKS, method=Method.METP)
    cost = cost_within(config, 64.0)
    share_left = cost.memory_limit_bytes / cost.cluster.device.memory_bytes
    return float(cost.peak_bytes(np.array([tokens]), scheme, num_devices=RANKS)[0]) / GIB / share_left


def run_side(side: Side, own: list[str], folder: Path, memory_gib: float) -> None:
    """Train one round of a side on real ranks."""
    shutil.rmtree(folder, ignore_errors=True)
    limits = [f"cluster.memory_gib={memory_gib}", f"data.max_length={side.reach}", "data.over_length=drop"]
    chosen = [] if side.name == ALL else [f"plan.methods=[{side.name}]"]
    run = RunFolder(folder)
    launch(run, [*own, *limits, *chosen], nproc=RANKS)
    for row in run.read_metrics():
        side.times_s.setdefault(row["step"], []).append(row["perf/step_time_s"])
    side.methods.clear()
    for plan in run.read_plans().values():
        for pipeline in plan.pipelines:
            for micro_batch in pipeline.micro_batches:
                side.methods.update(map(str, micro_batch.methods or pipeline.scheme.methods))


def contest(model: str, corpus: Path, work: Path, *, rounds: int, longest: int) -> tuple[list[Side], float]:
    """Every side on one corpus, and the memory limit in GiB."""
    own = settings(model, corpus, work)
    if not (work / f"{model}.json").exists():
        profile.run(None, own, out=work / f"{model}.json", nproc=RANKS, max_length=longest, repeats=5)
    config = load(None, own)
    memory_gib = limit_gib(config, longest * 3 // 4)
    reaches = {str(method): reach_of(cost_within(config, memory_gib), method) for method in METHODS}
    sides = [Side(ALL, max(reaches.values())), *(Side(name, reach) for name, reach in reaches.items())]
    for number in range(rounds):
        for side in sides:
            run_side(side, own, work / f"{model}-{corpus.name}-{side.name}-{number}", memory_gib)
    return sides, memory_gib


def section(model: str, corpus: str, sides: list[Side], memory_gib: float, lengths: np.ndarray) -> Section:
    """The table of one contest."""
    whole = sides[0]
    rows = []
    for side in sides:
        shared = int((lengths <= min(side.reach, whole.reach)).sum())
        share = whole.seconds(shared) / side.seconds(shared) - 1 if side is not whole and shared else None
        longest = int(lengths[lengths <= side.reach].max(initial=0))
        used = ", ".join(f"{name} {count / side.methods.total():.0%}" for name, count in side.methods.most_common())
        rows.append((
            side.name, f"{side.reach:,}", f"{longest:,}", shared, f"{side.seconds(shared):.2f} s",
            "" if share is None else f"{share:+.1%}", used,
        ))  # fmt: skip
    least = min(side.reach for side in sides)
    return Section(
        title=f"{model}, lengths like {corpus}",
        text=f"{LAYERS} layers, {RANKS} ranks, {memory_gib * 1024:.0f} MiB a device. "
        f"{PUBLISHED.get((model, corpus), 'No figure in its text')}; here sequences are {whole.reach / least - 1:.0%} "
        "longer than under the method that holds least.",
        head=(
            "side",
            "holds tokens",
            "longest trained",
            "sequences",
            "seconds",
            "seconds of paradyse against it",
            "layers by method",
        ),
        rows=rows,
        measured=(
            "seconds",
            "seconds of paradyse against it",
            "layers by method",
            "holds tokens",
            "longest trained",
            "sequences",
        ),
    )


def main() -> None:
    """Run every contest and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--longest", type=int, default=4096)
    parser.add_argument("--sequences", type=int, default=24)
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--work", type=Path, default=Path("outputs/benchmarks/paradyse"))
    options = parser.parse_args()
    sections = []
    for model in options.models:
        for name in CORPORA:
            corpus = make_corpus(name, options.work, count=options.sequences, longest=options.longest)
            sides, memory_gib = contest(model, corpus, options.work, rounds=options.rounds, longest=options.longest)
            lengths = np.sort(open_corpus(load(None, [f"data.index={corpus}"]).data).lengths.lengths)
            sections.append(say(section(model, name, sides, memory_gib, lengths)))
    write(
        "paradyse",
        title="ParaDySe's loop on real ranks",
        first=f"**Measured** on {RANKS} ranks of one thread each: small models, one sequence a step, short ones first, "
        "learned costs from a profile, all sides under one memory limit. What a side holds is what its costs say.",
        sections=sections,
    )


if __name__ == "__main__":
    main()
