"""The distributed sort beside the published sample sort: seconds, balance, and inputs made to upset it.

    python benchmarks/sort.py [--quick] [--rounds 3] [--ranks 2 4] [--limit 120] [--large 200000000]

Ranks are processes of one thread joined by Gloo, started here; both sides take turns in every round. --large also
orders so many float32 numbers in a file under 512 MiB. Writes sort.md and results/sort.json.
"""

import argparse
import os
import tempfile
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np
from method_ranks import RankError, Ranks
from pages import Cell, Goal, Section, at_least, at_most, say, write
from sort_runs import EACH, INPUTS, outcome, seconds

from lengthwise.data.external_sort import order_file, sort_file

TITLE = "Distributed sort"
FIRST = (
    "{ranks} ranks, processes of one thread joined by Gloo, on one machine. *published*: the sample sort of the post "
    "on training with variable-length inputs, written anew from its text. *ours*: `sort_rows`. Load average "
    "{load}.{quick}"
)
TIMES = (
    "int64 rows (length, id), log-normal lengths, sorted by the whole row. Seconds of the slowest rank; medians of "
    "{rounds} alternating rounds in one set of processes, and of their ratios. *Largest/smallest*: rows of the fullest "
    "rank over those of the emptiest. The published sort is left out where ten times its last time is over {limit} s."
)
UPSET = (
    "{count} ranks, {each:,} rows each unless said. *Rows out*: of all ranks, of as many as went in. Where a rank "
    "fails, those that wait for it are ended."
)
LARGE = (
    "Log-normal float32 numbers in a `.npy` file, `memory_bytes` 512 MiB, one thread. *Peak*: resident memory above "
    "what the process had before."
)
LARGE_MEMORY_BYTES = 512 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round, to a million rows; for a look")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--limit", type=float, default=120.0, help="seconds of one published sort")
    parser.add_argument("--large", type=int, default=0, help="numbers to sort in a file")
    options = parser.parse_args()
    rounds, sizes = (1, [10**5, 10**6]) if options.quick else (options.rounds, [10**5, 10**6, 10**7])
    loads = [os.getloadavg()[0]]
    sections = [say(times(count, sizes, rounds=rounds, limit_s=options.limit)) for count in options.ranks]
    sections += [say(upsets(count)) for count in options.ranks]
    if options.large:
        sections.append(say(large(options.large)))
    loads.append(os.getloadavg()[0])
    first = FIRST.format(
        ranks=" and ".join(map(str, options.ranks)), load=" to ".join(f"{load:.1f}" for load in loads),
        quick=" **A quick run.**" if options.quick else "",
    )  # fmt: skip
    write("sort", title=TITLE, first=first, sections=sections)


def times(count: int, sizes: list[int], *, rounds: int, limit_s: float) -> Section:
    """Both sides on ``count`` ranks."""
    ranks, rows, goals = Ranks(count), list[list[Cell]](), list[Goal]()
    expected_s, worst = 0.0, 0
    try:
        ranks.run(seconds, "ours", 1000, 0)
        for size in sizes:
            found: dict[str, list[list[tuple[float, int]]]] = {"ours": []}
            if expected_s <= limit_s:
                found["published"] = []
            for turn in range(rounds):
                for side in found:
                    found[side].append(ranks.run(seconds, side, size, turn))
            slowest = {side: [max(time_s for time_s, _ in run) for run in runs] for side, runs in found.items()}
            held = {side: [num_rows for _, num_rows in runs[-1]] for side, runs in found.items()}
            worst = max(worst, max(held["ours"]) - min(held["ours"]))
            ratio = None
            if "published" in found:
                expected_s = 10 * max(slowest["published"])
                ratio = median(theirs / ours for theirs, ours in zip(slowest["published"], slowest["ours"]))
            for side in ("published", "ours"):
                cells: list[Cell] = ["over the limit", None, None]
                if side in found:
                    faster = f"{ratio:.1f}x" if side == "ours" and ratio else None
                    cells = [f"{median(slowest[side]):.3f}", faster, _spread(held[side])]
                rows.append([f"{size:,}", side, *cells])
            if size == 10**6:
                goals.append(at_least(f"{count} ranks: faster at a million rows", ratio, 20.0, "x"))
    finally:
        ranks.close()
    goals.append(at_most(f"{count} ranks: rows that one rank has more than another", worst, 1, "rows"))
    return Section(
        title=f"Time on {count} ranks", text=TIMES.format(rounds=rounds, limit=f"{limit_s:g}"),
        head=("rows", "side", "seconds", "faster by", "largest/smallest"), rows=rows, goals=tuple(goals),
    )  # fmt: skip


def upsets(count: int) -> Section:
    """Inputs that a sample sort by one column cannot share out."""
    rows: list[list[Cell]] = []
    ranks = Ranks(count)
    for name in INPUTS:
        row: list[Cell] = [name]
        for side in ("published", "ours"):
            try:
                results = ranks.run(outcome, side, name)
                given, got = (sum(result[place] for result in results) for place in (0, 1))
                row += [f"{got:,} of {given:,}", _spread([result[1] for result in results])]
            except RankError as error:
                row += [f"none: {str(error)[:70]}", None]
                ranks = Ranks(count)
        rows.append(row)
    ranks.close()
    head = ("input", "published: rows out", "largest/smallest", "ours: rows out", "largest/smallest")
    text = UPSET.format(count=count, each=EACH)
    return Section(title=f"Inputs made to upset it, {count} ranks", text=text, head=head, rows=rows)


def large(count: int) -> Section:
    """A file beyond the memory that is allowed."""
    rows: list[list[Cell]] = []
    work = Path("outputs/benchmarks")  # not where temporary files are: that may be memory
    work.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=work) as folder:
        source, target = Path(folder) / "numbers.npy", Path(folder) / "sorted.npy"
        generator = np.random.default_rng(0)
        with source.open("wb") as file:
            header = {"descr": "<f4", "fortran_order": False, "shape": (count,)}
            np.lib.format.write_array_header_1_0(file, header)
            for first in range(0, count, 1 << 22):
                generator.lognormal(6.5, 1.3, min(1 << 22, count - first)).astype("<f4").tofile(file)
        for what, sort in (("sort_file", sort_file), ("order_file", order_file)):
            Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
            before, start_s = _memory("VmRSS"), perf_counter()
            sort(source, target, memory_bytes=LARGE_MEMORY_BYTES)
            time_s, peak = perf_counter() - start_s, _memory("VmHWM") - before
            found, given = (np.load(path, mmap_mode="r") for path in (target, source))
            verdict = "yes" if _is_ordered(found, given, places=what == "order_file") else "**no**"
            rows.append([what, f"{count:,}", f"{time_s:.0f}", f"{peak >> 20:,} MiB", verdict])
    head = ("function", "numbers", "seconds", "peak", "in order")
    return Section(title="Beyond memory", text=LARGE, head=head, rows=rows)


def _is_ordered(found: np.ndarray, given: np.ndarray, *, places: bool) -> bool:
    """Whether these are all numbers, or all of their places with equal ones by place, from the smallest on."""
    last, total = -np.inf, 0.0
    seen = np.zeros(len(given), dtype=bool)
    for first in range(0, len(found), 1 << 22):
        part = np.asarray(found[first : first + (1 << 22)])
        values = given[part] if places else part
        if values[0] < last or (np.diff(values) < 0).any():
            return False
        if places:
            seen[part] = True
            if (np.diff(part)[np.diff(values) == 0] < 0).any():
                return False
        last, total = values[-1], total + values.sum(dtype=np.float64)
    wanted = sum(given[first : first + (1 << 22)].sum(dtype=np.float64) for first in range(0, len(given), 1 << 22))
    return bool(len(found) == len(given) and abs(total - wanted) <= 1e-9 * wanted and (not places or seen.all()))


def _memory(name: str) -> int:
    """A line of what the system says of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def _spread(held: list[int]) -> str:
    """The largest share over the smallest."""
    return f"{max(held):,} / {min(held):,}"


if __name__ == "__main__":
    main()
