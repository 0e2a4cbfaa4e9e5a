"""A new strategy at every step beside the same one kept: time, bytes, shares of the step, and starting anew instead.

    python benchmarks/switching.py [--quick] [--rounds 7] [--only time,bytes,shares,restart]

Four ranks are processes of one thread joined by Gloo, started here. Writes switching.md and results/switching.json. A
full run takes about five minutes on two cores; leave the machine alone meanwhile.
"""

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import switching_bytes
import switching_restart
import switching_shares
import switching_time
from method_ranks import Ranks
from pages import Section, say, write
from switching_runs import LONGEST, POOL, RANKS, SPEC, TOKENS

TITLE = "A new strategy at every step"
FIRST = (
    "{ranks} ranks that are processes of one thread joined by Gloo on one machine of two cores, a Llama of "
    "{params:.1f} M parameters in float32 ({layers} layers of {hidden}, vocabulary {vocab:,}), {tokens:,} tokens a "
    "step, lengths like CommonCrawl's, cut at {longest}. A pool of {pool} strategies. Messages are copies through "
    "memory here. Times are ratios within a round; bytes do not depend on the machine. Load average {load}.{quick}"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few rounds; for a look")
    parser.add_argument("--rounds", type=int, default=0, help="visits of every strategy")
    parser.add_argument("--only", default="", metavar="A,B", help="only these sections; writes no page")
    options = parser.parse_args()
    loads = [os.getloadavg()[0]]
    ranks = Ranks(RANKS)
    try:
        parts = makers(ranks, rounds=options.rounds or (1 if options.quick else 8), quick=options.quick)
        wanted = options.only.split(",") if options.only else list(parts)
        if unknown := set(wanted) - set(parts):
            parser.error(f"no section {', '.join(sorted(unknown))}; there are {', '.join(parts)}")
        sections = [say(section) for name in wanted for section in parts[name]()]
    finally:
        ranks.close()
    loads.append(os.getloadavg()[0])
    if not options.only:
        write("switching", title=TITLE, first=first(loads, quick=options.quick), sections=sections)


def first(loads: list[float], *, quick: bool) -> str:
    """What was measured."""
    return FIRST.format(
        ranks=RANKS, params=SPEC.num_params / 1e6, layers=SPEC.num_layers, hidden=SPEC.hidden_size,
        vocab=SPEC.vocab_size, tokens=TOKENS, longest=LONGEST, pool=len(POOL),
        load=" to ".join(f"{load:.1f}" for load in loads),
        quick=" **A quick run.**" if quick else "",
    )  # fmt: skip


def makers(ranks: Ranks, *, rounds: int, quick: bool) -> dict[str, Callable[[], list[Section]]]:
    """Sections by name, in the order of the page. The last one ends the ranks."""
    visited = switching_time.Visits(ranks, rounds=rounds)

    def restart() -> list[Section]:
        with TemporaryDirectory() as folder:
            return [switching_restart.section(ranks, Path(folder), visited, times=1 if quick else 3)]

    return {
        "time": lambda: [switching_time.section(visited)],
        "bytes": lambda: [switching_bytes.section(visited)],
        "shares": lambda: [switching_shares.section(ranks, rounds=1 if quick else 9)],
        "restart": restart,
    }


if __name__ == "__main__":
    main()
