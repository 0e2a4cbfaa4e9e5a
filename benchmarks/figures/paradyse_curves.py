"""ParaDySe, Figure 2: cumulative time over sorted sequences, each method alone and mixed; curves end at OOM."""

from dataclasses import replace

import numpy as np
from paper_page import Figure, Row
from paper_paradyse import FITS, LAYERS_RUN, METHODS, sorted_run
from plots import Panel, picture

from lengthwise.core.specs import ModelSpec, model_preset
from lengthwise.data.synthetic import synthetic_lengths

MODELS = {"BERT": ("bert-1024", 24), "LLaMA": ("llama-66b", LAYERS_RUN), "GPT": ("gpt-12288", LAYERS_RUN)}
"""Its name -> our preset and its layers on one node (Table 4)."""
CORPORA = {"GitHubCode": "githubcode", "GRCh38": "grch38"}
SEQUENCES = 300
MIXED = "paradyse"
PUBLISHED = {
    ("GPT", "GitHubCode"): (144.16, None), ("GPT", "GRCh38"): (181.22, None),
    ("BERT", "GitHubCode"): (None, 89.29), ("BERT", "GRCh38"): (None, 58.01),
}  # fmt: skip
"""Up to so many per cent longer sequences, and less time until the longest, than a method alone (its section 4.2)."""


def cumulative_times() -> Figure:
    """Six panels and the gains that the text gives."""
    panels, rows = [], []
    for name in MODELS:
        for corpus, lengths_name in CORPORA.items():
            lengths = np.sort(synthetic_lengths(lengths_name, SEQUENCES, 0))
            runs = {str(method): sorted_run((method,), lengths, _model(name)) for method in METHODS}
            runs[MIXED] = sorted_run(METHODS, lengths, _model(name))
            panels.append(_panel(f"{name}, {corpus}", runs, lengths))
            rows += _rows(name, corpus, runs, lengths)
    svg = picture("ParaDySe, Figure 2: cumulative time and reach, 8 A100s of 80 GB", *panels)
    text = (
        f"{SEQUENCES} sequences of the published histograms, short ones first, one a step; our closed forms. A curve "
        "ends, with a dot, at the longest sequence that fits."
    )
    return Figure(svg=svg, rows=tuple(rows), text=text)


def _model(name: str) -> ModelSpec:
    preset, num_layers = MODELS[name]
    return replace(model_preset(preset), num_layers=num_layers, causal=False)


def _panel(title: str, runs: dict[str, tuple[int, np.ndarray]], lengths: np.ndarray) -> Panel:
    lines = {
        name: list(zip((lengths[: len(times_s)] / 1000).tolist(), np.cumsum(times_s).tolist()))
        for name, (_, times_s) in runs.items()
    }
    return Panel(
        title=title, x_title="length (K tokens)", y_title="cumulative time (s)", lines=lines,
        dots={name: points[-1:] for name, points in lines.items()}, log_x=True,
    )  # fmt: skip


def _rows(name: str, corpus: str, runs: dict[str, tuple[int, np.ndarray]], lengths: np.ndarray) -> list[Row]:
    longer, faster = PUBLISHED.get((name, corpus), (None, None))
    mixed_longest, mixed_s = runs[MIXED]
    alone = [run for method, run in runs.items() if method != MIXED]
    rows = []
    if longer:
        shortest = min(longest for longest, _ in alone)
        rows.append(
            Row(
                what=f"{name}, {corpus}: longer sequences than a method alone, up to", published=longer,
                ours=100 * (mixed_longest / shortest - 1), unit="%",
                why="ours counts what each layer keeps; theirs are measured peaks of buffers that never shrink",
            )
        )  # fmt: skip
    if faster:
        slowest_s = max(times_s.sum() for _, times_s in alone if len(times_s) == len(mixed_s))
        rows.append(
            Row(
                what=f"{name}, {corpus}: less time up to the longest sequence, at most", published=faster,
                ours=100 * float(1 - mixed_s.sum() / slowest_s), unit="%",
                why="closed forms charge metp fewer seconds before the first token than its authors measured",
            )
        )  # fmt: skip
        rows.append(
            Row(
                what=f"{name}, {corpus}: the same under the fits of its code", published=faster,
                ours=_by_their_fits(MODELS[name][0], lengths), unit="%",
                why="its costs on our sample of its histogram, so the rest is how many sequences were short",
            )
        )  # fmt: skip
    return rows


def _by_their_fits(preset: str, lengths: np.ndarray) -> float:
    """Per cent of the time of all sequences that the best method of each saves against the slowest method alone."""
    (fits,) = (each.fits for each in FITS if each.preset == preset)
    times_s = np.array([np.polyval(fit, lengths) for fit in fits.values()])
    return 100 * float(1 - times_s.min(axis=0).sum() / times_s.sum(axis=1).max())
