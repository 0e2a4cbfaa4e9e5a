"""Every class of language model that transformers exports: does a prepared model learn what the stock model learns?

    python benchmarks/families.py                                    # all classes at 1, 2 and 4 ranks; about an hour
    python benchmarks/families.py --classes LlamaForCausalLM,BertForMaskedLM --ranks 2

Each class is built tiny, in float64 and without dropout (:mod:`tiny_models`). The reference is the stock model as its
user calls it: one sequence at a time, ``model(input_ids=..., labels=...)`` and nothing else, each sequence weighted by
its targets. Beside it the same class goes through :func:`lengthwise.prepare` and one step of packs, at several degrees,
with and without recomputed layers; what every parameter moved by is compared. The outcome is one of

    exact     gradients of all parameters agree to ``TOLERANCE``, and the degrees at which they were computed
    refused   ``prepare`` raised one of its own errors, before anything was trained
    wrong     it trained, and learned something else
    failed    anything else: a traceback, a hang
"""

import argparse
import copy
import gc
import json
import multiprocessing as mp
import os
import socket
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from tiny_models import FIRST_TOKEN, NUM_LABELS, SPECIAL_TOKENS, VOCAB_SIZE, ModelClass, all_classes, build

LENGTHS = (13, 5, 21, 2, 8, 30, 9, 17)
"""Tokens of the sequences of the step."""
TOLERANCE = 1e-7
"""Largest difference of a gradient, relative to the model's largest one. Rounding in float64 is 1e-12; classes that
compute a softmax or a norm in float32 in any case reach 1e-8."""
LIMIT_S = 300.0
"""After this a trial counts as hung."""
IGNORE = -100


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of one class on some number of ranks."""

    kind: str
    name: str
    ranks: int
    outcome: str
    error: float | None = None
    """Largest relative difference of a gradient."""
    degrees: tuple[int, ...] = ()
    """Ranks that shared a micro-batch."""
    message: str = ""


def corpus(kind: str) -> list[dict[str, Any]]:
    """Items as a user of transformers has them."""
    items = []
    for number, length in enumerate(LENGTHS):
        rng = np.random.default_rng(number)
        ids = rng.integers(FIRST_TOKEN, VOCAB_SIZE, length)
        item: dict[str, Any] = {"input_ids": ids.tolist(), "labels": ids.tolist()}
        if kind == "masked":
            hidden = rng.random(length) < 0.4
            hidden[0] = True
            item = {"input_ids": np.where(hidden, 5, ids).tolist(), "labels": np.where(hidden, ids, IGNORE).tolist()}
        elif kind == "tokens":
            item["labels"] = rng.integers(0, NUM_LABELS, length).tolist()
        elif kind == "sequences":
            item["labels"] = int(rng.integers(0, NUM_LABELS))
            item["input_ids"][-1] = SPECIAL_TOKENS["eos_token_id"]  # Bart reads what it says of the whole there
        items.append(item)
    return items


def stock_gradients(model: Any, kind: str) -> dict[str, Any]:
    """Gradient of every trained parameter: the stock model sequence by sequence, each weighted by its targets."""
    import torch

    losses, weights = [], []
    for item in corpus(kind):
        ids = torch.tensor([item["input_ids"]])
        labels = torch.tensor([item["labels"]])
        output = model(input_ids=ids, labels=labels)
        losses.append(output.loss)
        weights.append(_num_targets(model, ids, labels, kind))
    total = sum(weights)
    sum(loss * (weight / total) for loss, weight in zip(losses, weights, strict=True)).backward()
    return {
        name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for name, p in model.named_parameters() if p.requires_grad and p.numel()
    }  # fmt: skip


def _num_targets(model: Any, ids: Any, labels: Any, kind: str) -> int:
    """How many targets the mean behind the stock loss is over; the first label counts where the class shifts none."""
    import torch

    if kind == "sequences":
        return 1
    count = int((labels != IGNORE).sum())
    if kind != "causal":
        return count
    first = torch.full_like(labels, IGNORE)
    first[0, 0] = labels[0, 0]
    with torch.no_grad():
        loss = float(model(input_ids=ids, labels=first).loss)
    return count if loss == loss and loss != 0.0 else count - 1


def plan_of(batch: Any, num_layers: int, num_ranks: int, max_degree: int) -> Any:
    """Packs of one and of many sequences, at degree 1 and at the largest, some layers recomputed in some."""
    from lengthwise.core.batch import Pack
    from lengthwise.core.pipeline_config import Method, uniform_scheme
    from lengthwise.core.planned_micro_batch import PlannedMicroBatch
    from lengthwise.core.step_plan import Pipeline, StepPlan

    lengths = dict(zip(batch.ids, batch.lengths, strict=True))

    def pipeline(ranks: tuple[int, ...], packs: list[list[int]], phase: int) -> Any:
        planned = []
        for number, ids in enumerate(packs):
            flags = [(layer + number) % 2 == 0 for layer in range(num_layers)] if number else [False] * num_layers
            pack = Pack(ids=tuple(ids), lengths=tuple(lengths[i] for i in ids))
            planned.append(PlannedMicroBatch(pack=pack, time_s=1.0, peak_bytes=0, recompute=tuple(flags)))
        method = Method.DENSE if len(ranks) == 1 else Method.ULYSSES
        scheme = uniform_scheme(num_layers, degree=len(ranks), method=method, recomputed=min(1, num_layers))
        return Pipeline(ranks=ranks, phase=phase, scheme=scheme, micro_batches=tuple(planned))

    ids = sorted(lengths)
    if max_degree == 1 or num_ranks == 1:
        shares = [ids[rank::num_ranks] for rank in range(num_ranks)]
        pipelines = [
            pipeline((rank,), [part for part in (share[:2], share[2:]) if part], 0) for rank, share in enumerate(shares)
        ]
    else:
        wide = tuple(range(num_ranks - 1)) if num_ranks > 2 else (0, 1)
        others = tuple(rank for rank in range(num_ranks) if rank not in wide)
        pipelines = [pipeline(wide, [ids[:3], ids[3:5]], 0), *(pipeline((r,), [], 0) for r in others)]
        pipelines += [pipeline((rank,), [ids[5:6], ids[6:]] if rank == 0 else [], 1) for rank in range(num_ranks)]
    return StepPlan(
        step=batch.step, policy="by hand", pipelines=tuple(pipelines), loss_normaliser=batch.num_targets, update_s=0.0,
        time_s=1.0, lower_bound_s=1.0,
    )  # fmt: skip


@contextmanager
def in_double() -> Any:
    """Casts to float32, by ``.float()``, ``.to(torch.float32)`` or a softmax, and new tensors of it are float64."""
    import torch
    from torch import Tensor, float32, float64

    # Not those of functional: they name themselves to who intercepts them, and attention by hand would not be known.
    casts = {name: getattr(Tensor, name) for name in ("to", "type", "softmax", "log_softmax")}
    zeros_like, full = torch.zeros_like, torch.full

    def in_double_of(cast: Any) -> Any:
        def cast_in_double(self: Any, *args: Any, **kwargs: Any) -> Any:
            kwargs = {name: float64 if value is float32 else value for name, value in kwargs.items()}
            return cast(self, *(float64 if value is float32 else value for value in args), **kwargs)

        return cast_in_double

    def zeros_in_double(x: Any, **kwargs: Any) -> Any:
        return zeros_like(x, **{name: float64 if value is float32 else value for name, value in kwargs.items()})

    def full_in_double(size: Any, value: Any, **kwargs: Any) -> Any:
        return full(size, value, **({"dtype": float64} if isinstance(value, float) else {}) | kwargs)

    for name, cast in casts.items():
        setattr(Tensor, name, in_double_of(cast))
    Tensor.float = Tensor.double  # type: ignore[method-assign]
    torch.zeros_like, torch.full = zeros_in_double, full_in_double
    try:
        yield
    finally:
        for name in (*casts, "float"):
            delattr(Tensor, name)
        torch.zeros_like, torch.full = zeros_like, full


def trained_gradients(model: Any, kind: str) -> tuple[dict[str, Any], tuple[int, ...]]:
    """What a step of the prepared model moved each parameter by, and the degrees of its micro-batches."""
    import lengthwise as lw
    from lengthwise.config.optimizer_settings import OptimizerSettings
    from tests.plan.costs import SimpleCost

    options: dict[str, Any] = {"mask_token_id": SPECIAL_TOKENS["mask_token_id"]} if kind == "masked" else {}
    plain_sgd = OptimizerSettings(name="sgd", momentum=0.0, weight_decay=0.0)
    run = lw.prepare(
        model, corpus(kind), sequences_per_step=len(LENGTHS), order="corpus", steps=1, optimizer=plain_sgd, lr=1.0,
        clip_norm=0.0, cost=SimpleCost(capacity=1000), memory_gib=1000, policy="static", verbose=False, **options,
    )  # fmt: skip
    num_layers, max_degree = (
        run.wrapped_model.structure.num_layers,
        1 if run.wrapped_model.by_sequence else run.world.size,
    )
    run.planner = lambda batch: plan_of(batch, num_layers, run.world.size, max_degree)
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    degrees = set()
    for step in run.steps():
        degrees |= {p.scheme.degree for p in step.plan.pipelines if p.micro_batches}
        for micro_batch in step:
            step.backward(model(**micro_batch.inputs).loss)
        step.update()
    moved = {name: before[name] - value.detach() for name, value in model.named_parameters() if value.requires_grad}
    return moved, tuple(sorted(degrees))


def largest_difference(model: Any, kind: str) -> tuple[float, tuple[int, ...]]:
    """The largest difference of a gradient relative to the largest gradient, and the degrees."""
    with in_double():
        expected = stock_gradients(copy.deepcopy(model), kind)
        moved, degrees = trained_gradients(model, kind)
    size = np.max([float(gradient.abs().max()) for gradient in expected.values()])
    return float(np.max([float((moved[name] - expected[name]).abs().max()) for name in expected]) / size), degrees


def compare_gradients(model_class: ModelClass, num_ranks: int) -> dict[str, Any]:
    """The outcome of a class on this rank: exact or wrong, and by how much."""
    error, degrees = largest_difference(build(model_class), model_class.kind)
    return {"outcome": "exact" if error <= TOLERANCE else "wrong", "error": error, "degrees": degrees}


Compare = Callable[[ModelClass, int], dict[str, Any]]
"""From a class and the number of ranks to the outcome on this one; what it raises is one too."""


def rank_main(compare: Compare, model_class: ModelClass, rank: int, num_ranks: int, port: int, results: Any) -> None:
    """One rank of one trial."""
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(num_ranks), LOCAL_WORLD_SIZE=str(num_ranks),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
    )  # fmt: skip
    from lengthwise.core.errors import LengthwiseError

    warnings.filterwarnings("ignore")
    _be_silent()
    outcome: dict[str, Any]
    try:
        outcome = compare(model_class, num_ranks)
    except LengthwiseError as refusal:
        outcome = {"outcome": "refused", "message": str(refusal)}
    except BaseException as failure:
        frame = traceback.extract_tb(failure.__traceback__)[-1]
        where = f"{Path(frame.filename).name}:{frame.lineno}"
        outcome = {"outcome": "failed", "message": f"{type(failure).__name__} at {where}: {failure}"[:600]}
    results.put((rank, outcome))
    results.close()
    results.join_thread()
    os._exit(0)


class Trial:
    """One class on some number of ranks, each a process forked from this one; they compute from the start."""

    def __init__(self, model_class: ModelClass, num_ranks: int, compare: Compare = compare_gradients) -> None:
        self.model_class, self.num_ranks = model_class, num_ranks
        context = mp.get_context("fork")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._results = context.Queue()
        arguments = [(compare, model_class, rank, num_ranks, port, self._results) for rank in range(num_ranks)]
        self._ranks = [context.Process(target=rank_main, args=each, daemon=True) for each in arguments]
        self._end = time.monotonic() + LIMIT_S
        for process in self._ranks:
            process.start()

    def outcome(self) -> Outcome:
        """The worst outcome of the ranks."""
        by_rank: dict[int, dict[str, Any]] = {}
        while len(by_rank) < self.num_ranks and time.monotonic() < self._end:
            try:
                rank, outcome = self._results.get(timeout=1.0)
                by_rank[rank] = outcome
            except Exception:
                if not any(process.is_alive() for process in self._ranks):
                    break
        for process in self._ranks:
            process.kill()
            process.join()
        if len(by_rank) < self.num_ranks and not any(one["outcome"] == "failed" for one in by_rank.values()):
            missing = sorted(set(range(self.num_ranks)) - set(by_rank))
            by_rank[-1] = {"outcome": "failed", "message": f"ranks {missing} died or did not end in {LIMIT_S:.0f} s"}
        order = ("failed", "wrong", "refused", "exact")
        worst = min(by_rank.values(), key=lambda one: (order.index(one["outcome"]), -(one.get("error") or 0.0)))
        return Outcome(kind=self.model_class.kind, name=self.model_class.name, ranks=self.num_ranks, **worst)


def outcomes(model_class: ModelClass, sizes: list[int]) -> list[Outcome]:
    """Of a class on each number of ranks; one rank computes beside the most, which wait for each other."""
    with suppress(Exception):  # the ranks have the reason
        model_class.load()
    results: list[Outcome] = []
    for num_ranks in sorted((size for size in sizes if size > 1 or len(sizes) == 1), reverse=True):
        trials = [Trial(model_class, num_ranks)]
        if not results and num_ranks > 1 and 1 in sizes:
            trials.append(Trial(model_class, 1))
        results += [trial.outcome() for trial in trials]
    reason = "" if all(result.outcome == "exact" for result in results) else can_be_built(model_class)
    if reason:
        not_built = partial(Outcome, kind=model_class.kind, name=model_class.name, outcome="not built", message=reason)
        return [not_built(ranks=result.ranks) for result in results]
    return results


def can_be_built(model_class: ModelClass) -> str:
    """Nothing, or why the stock class does not compute a loss of one tiny sequence here."""
    receive, send = mp.Pipe(duplex=False)
    process = mp.get_context("fork").Process(target=_try_stock, args=(model_class, send), daemon=True)
    process.start()
    answer = receive.recv() if receive.poll(120) else "no answer in two minutes"
    process.kill()
    process.join()
    return str(answer)


def _try_stock(model_class: ModelClass, send: Any) -> None:
    _be_silent()
    try:
        with in_double():
            model = build(model_class)
            gradients = stock_gradients(model, model_class.kind)
            model.zero_grad()
            again = stock_gradients(model, model_class.kind)
        is_finite = all(bool(gradient.isfinite().all()) for gradient in gradients.values())
        is_same = all(bool((again[name] - gradients[name]).abs().max() < TOLERANCE) for name in gradients)
        message = "" if is_same else "the stock model draws random numbers without dropout"
        send.send(message if is_finite else "the stock model's own gradient is not finite")
    except BaseException as error:
        send.send(f"{type(error).__name__}: {error}".replace("\n", " ")[:200])
    os._exit(0)


def _be_silent() -> None:
    """Send what this process prints nowhere: the sweep prints one line a trial."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)


def import_once() -> None:
    """Import what trials need before they fork: they compute for a second, and imports would take each of them four."""
    import torch
    import torch._dynamo
    import torch.distributed
    import torch.utils.checkpoint
    import transformers

    import lengthwise
    from lengthwise.runtime.state import optimizer  # noqa: F401
    from tests.plan import costs  # noqa: F401

    assert lengthwise.prepare
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    warnings.filterwarnings("ignore")
    gc.freeze()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--classes", default="", help="names, separated by commas; all of --kinds without")
    parser.add_argument("--kinds", default="causal,masked,tokens,sequences")
    parser.add_argument("--ranks", default="1,2,4")
    parser.add_argument("--out", default="", help="file of JSON lines; classes that are in it are not tried again")
    arguments = parser.parse_args()
    os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    sys.path.insert(0, str(Path(__file__).parents[1]))
    import_once()
    chosen = [name for name in arguments.classes.split(",") if name]
    done, counts = set(), Counter[str]()
    out = Path(arguments.out) if arguments.out else None
    if out and out.exists():
        done = {(row["kind"], row["name"], row["ranks"]) for row in map(json.loads, out.read_text().splitlines())}
    for model_class in all_classes(tuple(arguments.kinds.split(","))):
        if chosen and model_class.name not in chosen:
            continue
        sizes = [int(n) for n in arguments.ranks.split(",") if (model_class.kind, model_class.name, int(n)) not in done]
        for result in outcomes(model_class, sizes):
            counts[result.outcome] += 1
            line = json.dumps(asdict(result))
            print(line, flush=True)
            if out:
                with out.open("a") as lines:
                    lines.write(line + "\n")
    print(dict(counts), flush=True)


if __name__ == "__main__":
    main()
