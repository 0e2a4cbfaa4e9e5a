"""A run in words: what ran on what, what happened to long sequences, how it ended, and its key figures."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from lengthwise.core.wording import counted
from lengthwise.report.record import RunRecord
from lengthwise.report.run_summary import RunSummary
from lengthwise.report.units import compact, count, number, seconds, share

MOST_SAMPLED_STEPS = 4
"""Last steps whose samples of text a page shows."""


class KeyFigure(NamedTuple):
    """One key figure."""

    label: str
    value: str
    note: str


def tiles(summary: RunSummary) -> list[KeyFigure]:
    """The six figures that a reader in a hurry reads."""
    uncounted = {0: "padding", 1: "padding and the first step"}.get(
        summary.num_warmup, f"padding and the first {summary.num_warmup:,} steps"
    )
    return [
        KeyFigure("tokens per second", count(summary.tokens_per_s), f"{uncounted} not counted"),
        KeyFigure("idle", share(summary.idle_fraction), "of the device time; no timelines"
                  if summary.idle_fraction is None
             else "of the device time"),
        KeyFigure("padding", share(summary.padding_fraction), "of the computed tokens"),
        KeyFigure("prediction error", share(summary.prediction_error),
                  "median over steps of predicted against measured"),
        KeyFigure("gap to the bound", share(summary.gap), "median of predicted time above the proven lower bound"),
        KeyFigure("final loss", number(summary.final_loss), f"per token, after {counted(summary.num_steps, 'step')}"),
    ]  # fmt: skip


def headline(summary: RunSummary, *, label: str) -> str:
    """One line under a title that says ``label``."""
    sizes = {"step": summary.num_steps, "token": summary.num_tokens}
    ranks = f"{summary.ranks_in_words} rank{'s' * (summary.num_ranks > 1)}"
    parts = [f"policy {summary.policy}", ranks, *(counted(number_of, noun) for noun, number_of in sizes.items())]
    return " · ".join(parts if label == summary.name else [summary.name, *parts])


def alarm(record: RunRecord, summary: RunSummary) -> str:
    """A sentence when the run has not ended well, or not yet, and one when steps are missing; else empty."""
    return f"{_unfinished(record, summary)} {summary.missing_in_words}".strip()


def _unfinished(record: RunRecord, summary: RunSummary) -> str:
    wanted = record.setting("train", "steps")
    steps = f"{summary.num_steps:,} of {counted(wanted, 'step')}" if isinstance(wanted, int) else ""
    progress = f"the report has {steps or counted(summary.num_steps, 'step')}"
    if summary.status == "done" or (summary.status == "unknown" and summary.num_steps == wanted):
        return ""
    if summary.status in ("running", "unknown"):
        return f"The run has not said how it ended: it is still going, or was killed; {progress}."
    reason = str(record.status.get("error") or "")
    return f"The run ended as {summary.status}: {progress}. {reason}".rstrip()


def order_words(order: dict[str, Any]) -> str:
    """What comes when, from what a sampler says of its order."""
    name, metric = order["name"], str(order.get("metric", "")).partition(" ")[0]
    if name in ("shuffled", "corpus"):
        return {"shuffled": "shuffled", "corpus": "in the order of the corpus"}[name]
    if name == "sorted":
        return f"sorted by {metric}"
    if name == "windowed":
        return f"sorted by {metric} within windows of {order['window']:,} sequences"
    pacing = {
        "step": f"pacing step from {order['start']:g} in {order['stages']} stages",
        "natural": f"pacing natural, {order['stages']} groups",
    }.get(order["pacing"], f"pacing {order['pacing']} from {order['start']:g}")
    epochs = order["epochs"]
    words = f"curriculum by {metric}, {pacing}"
    return words if epochs is None else f"{words}, shuffled after {counted(epochs, 'epoch')}"


def what_ran(record: RunRecord, summary: RunSummary) -> list[tuple[str, str]]:
    """Terms and descriptions; only what the run's files say."""
    again = f", start {len(record.starts)}" if len(record.starts) > 1 else ""
    facts = [
        ("Policy", _policy(record, summary)),
        ("Model", _model(record)),
        ("Ranks", _ranks(record, summary)),
        ("Corpus", _corpus(record)),
        ("Batch", _batch(record)),
        ("Order", _order(record)),
        ("Learning-rate", _learning_rate(record)),
        ("Long sequences", _length_rule(record)),
        *_learned_from(record.ledger),
        ("Validation", _validation(summary)),
        ("Step time", _step_time(summary)),
        ("Balance", _balance(summary)),
        ("Data", _data(summary)),
        ("Status", "" if summary.status == "unknown" else summary.status),
        ("Folder", summary.path),
        *(start_facts(record.starts[-1], again=again) if record.starts else []),
    ]
    return [(term, words) for term, words in facts if words]


def shown_samples(record: RunRecord) -> list[tuple[str, str, str]]:
    """Step, prompt and continuation of the samples of text of the first and the last steps that have any."""
    steps = list(dict.fromkeys(row["step"] for row in record.samples))
    shown = {*steps[:1], *steps[-MOST_SAMPLED_STEPS:]}
    return [
        (f"step {row['step'] + 1:,}", str(row.get("prompt")), str(row.get("text")))
        for row in record.samples
        if row["step"] in shown
    ]


def start_facts(start: Mapping[str, Any], *, again: str = "") -> list[tuple[str, str]]:
    """When, where, with what and by which command a process was started, of a dictionary as in provenance.json."""
    commit, torch_version = start.get("commit"), start.get("torch_version")
    software = [
        f"Lengthwise {start.get('lengthwise_version')}" + (f" ({commit})" if commit else ""),
        *([f"torch {torch_version}"] if torch_version else []),
        f"Python {start.get('python_version')}",
    ]
    date = str(start.get("date")).replace("T", " ").removesuffix("+00:00")
    return [
        ("Started", f"{date} UTC on {start.get('host')}{again}"),
        ("Software", ", ".join(software)),
        ("Command", str(start.get("command"))),
    ]


def _policy(record: RunRecord, summary: RunSummary) -> str:
    costs = record.setting("plan", "profile")
    if plans := record.setting("plan", "file"):
        return f"{summary.policy}, plans from {plans}"
    details = [f"costs from {costs}" if costs else "analytic costs"]
    if record.setting("plan", "recompute") == "all":
        details.append("every layer recomputed in the backward")
    return f"{summary.policy}, {', '.join(details)}"


def _model(record: RunRecord) -> str:
    name = record.setting("model", "hf") or record.model.get("name") or record.setting("model", "preset") or ""
    size = record.model.get("num_params")
    return f"{name}, {compact(size)} parameters" if isinstance(size, int) else str(name)


def _ranks(record: RunRecord, summary: RunSummary) -> str:
    cluster, device = record.corpus.get("cluster"), record.setting("train", "device")
    where = cluster or record.setting("cluster", "name") or (device if device != "auto" else "")
    dtype = record.setting("train", "dtype")
    return summary.ranks_in_words + (f" on {where}" if where else "") + (f", {dtype}" if dtype else "")


def _corpus(record: RunRecord) -> str:
    corpus = record.corpus
    parts = [
        counted(corpus[key], noun)
        for key, noun in (("num_sequences", "sequence"), ("num_tokens", "token"))
        if isinstance(corpus.get(key), int)
    ]
    if isinstance(corpus.get("max_length"), int):
        parts.append(f"longest {count(corpus['max_length'])} tokens")
    indexes = record.setting("data", "index") or " + ".join(corpus.get("indexes", {}).values())
    return ", ".join(parts) + (f" ({indexes})" if indexes and parts else str(indexes or ""))


def _batch(record: RunRecord) -> str:
    if budget := record.setting("data", "tokens_per_step"):
        return f"{count(budget)} tokens a step"
    number_of = record.setting("data", "sequences_per_step")
    return f"{counted(number_of, 'sequence')} a step" if number_of else ""


def _order(record: RunRecord) -> str:
    if not record.sampling:
        return "shuffled" if record.setting("data", "order") == "shuffled" else ""
    return "; ".join([order_words(record.sampling["order"]), *record.sampling["warnings"]])


def _learning_rate(record: RunRecord) -> str:
    """How it followed the batches, if it did."""
    rule, factors = record.setting("optim", "lr_scaling"), [row.get("lr_factor", 1.0) for row in record.rows]
    if rule not in ("linear", "sqrt"):
        return ""
    by = {"linear": "the", "sqrt": "the square root of the"}[rule] + f" {record.setting('optim', 'lr_scaling_by')}"
    return f"scaled by {by} of each batch, by {min(factors):.2f} to {max(factors):.2f}"


_RULES = {
    "error": "longer ones are refused",
    "drop": "longer ones are left out",
    "truncate": "longer ones are cut off there",
    "split": "longer ones are split into pieces",
}


def _length_rule(record: RunRecord) -> str:
    if not record.config:
        return ""
    limit = record.setting("data", "max_length")
    rule = "no limit"
    if limit:
        rule = f"at most {count(limit)} tokens, {_RULES.get(str(record.setting('data', 'over_length')), '')}".rstrip(
            ", "
        )
    return f"{rule}; {_counted(record.ledger)}" if record.ledger else rule


def _counted(ledger: dict[str, Any]) -> str:
    """What the limit did, as the ledger counted it."""
    counts = {key: value for key, value in ledger.items() if isinstance(value, int) and value}
    parts = []
    if "dropped" in counts:
        tokens = counted(counts.get("tokens_dropped", 0), "token")
        parts.append(f"{counted(counts['dropped'], 'sequence')} left out, with {tokens}")
    if "truncated" in counts:
        tokens = counted(counts.get("tokens_cut", 0), "token")
        parts.append(f"{counted(counts['truncated'], 'sequence')} cut, losing {tokens}")
    if "split" in counts:
        pieces = counted(counts.get("pieces", 0), "piece")
        parts.append(f"{counted(counts['split'], 'sequence')} split into {pieces}, losing none")
    return "; ".join(parts) or "every token of every sequence is kept"


def _learned_from(ledger: dict[str, Any]) -> list[tuple[str, str]]:
    """What has been seen of each part of the corpus, by the last checkpoint."""
    parts = ledger.get("parts", [])
    return [("Seen" if len(parts) == 1 else f"Seen of {part['name']}", _seen(part)) for part in parts]


def _seen(part: dict[str, Any]) -> str:
    sizes = f"{counted(part['sequences_seen'], 'sequence')}, {counted(part['tokens_seen'], 'token')}"
    words = f"{sizes}, {part['passes']:.4g} passes"
    if part["repeat"] != 1:
        words += f", {part['repeat']:.4g} an epoch"
    refused = ", ".join(f"{count(number)} {reason}" for reason, number in part["refused"].items())
    return f"{words}; left out when it was indexed: {refused}" if refused else words


def _validation(summary: RunSummary) -> str:
    losses = [(s.validation_loss, s.step + 1) for s in summary.steps if s.validation_loss is not None]
    if not losses:
        return ""
    loss, step = min(losses, key=lambda item: (math.isnan(item[0]), item))
    return (
        f"lowest loss {number(loss)} per token, after {counted(step, 'step')}; computed {counted(len(losses), 'time')}"
    )


def _step_time(summary: RunSummary) -> str:
    if summary.step_time_s is None:
        return ""
    words = f"median {seconds(summary.step_time_s)} measured"
    has_prediction = summary.predicted_step_time_s is not None
    return f"{words}, {seconds(summary.predicted_step_time_s)} predicted" if has_prediction else words


def _balance(summary: RunSummary) -> str:
    if summary.imbalance is None:
        return ""
    return f"the busiest rank computes {summary.imbalance:.2f} times as long as the mean (median over steps)"


def _data(summary: RunSummary) -> str:
    return "" if summary.data_wait is None else f"waited for {summary.data_wait:.2%} of the time"
