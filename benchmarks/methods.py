"""The parallel methods beside each other, beside one device and beside public implementations: time, bytes, reach.

    python benchmarks/methods.py [--quick] [--peers DIR] [--gpu] [--longest 65536] [--only bytes,times]

Ranks are processes of one thread joined by Gloo, started here. How to fill DIR is told in method_peers.py; a peer that
cannot be loaded is reported as not run. Writes methods.md and results/methods.json. A full run takes about twelve
minutes on two cores; leave the machine alone meanwhile.
"""

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path

import method_balance
import method_device
import method_layers
import method_peers
import method_reach
from method_layers import NARROW, WIDE, Setting
from method_ranks import Ranks
from pages import Section, say, write

TITLE = "Parallel methods: time, bytes, reach"
FIRST = (
    "One layer, or its attention, or a small model, shared by ranks that are processes of one thread joined by Gloo on "
    "one machine. Messages are copies through memory here, so a method that sends more loses less than it would over a "
    "network. Times are ratios within a round; all methods take turns in each. Bytes do not depend on the machine."
)
ROUNDS = {256: 9, 1024: 7, 2048: 5, 4096: 5, 8192: 3, 16_384: 2, 32_768: 1, 65_536: 1}
TWO_RANKS = 16_384
"""Longest sequence on two ranks; longer ones on four alone, for time."""
REACH = (
    "The order is the paper's where it counts: METP reaches farthest. ParaDySe's GPT ends at 112,128 tokens without "
    "METP and at 329,728 with it, a factor of 2.9 (table 5; whole GPUs, so weights and fragmentation are in it). The "
    "memory model of its code has METP keep a fifth of what the others do (2 b s h / p a layer against 10). Ours keeps "
    "a quarter here, 5 of 20 numbers of h: `metp` keeps the inputs of both norms and of both operators and attention's "
    "outputs, and makes the rest again; without a gate it would be 5 of 16. The loss keeps as much under every method, "
    "which makes the factor of the whole model smaller. `colossal_z` reaches as far as `megatron_cz`, where the paper "
    "leaves it out: theirs holds the scores, N T^2 / p numbers, ours sends the keys twice. `ulysses` keeps attention's "
    "output in both splits and reaches the least."
)
HEAVY = (
    "Whole weights lose: `ulysses` and `ring` hold all weights and their gradients on every rank. Gathering them "
    "(`ulysses_z`, `megatron_cz`, `colossal_z`) leaves one layer's whole weights and gradients at a time. "
    "`megatron_ts` never has more than its share, and `metp` two shards of one operator and their gradients."
)

Make = Callable[[], list[Section]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer lengths and rounds; for a look")
    parser.add_argument("--peers", type=Path, metavar="DIR", help="folder with the packages of method_peers.py")
    parser.add_argument("--gpu", action="store_true", help="also one layer on a CUDA device")
    parser.add_argument("--longest", type=int, default=32_768, help="tokens; 65536 takes five minutes more")
    parser.add_argument("--only", default="", metavar="A,B", help="only these sections; writes no page")
    options = parser.parse_args()
    ranks = {degree: Ranks(degree) for degree in (1, 2, 4)}
    parts = makers(ranks, options)
    wanted = options.only.split(",") if options.only else list(parts)
    if unknown := set(wanted) - set(parts):
        parser.error(f"no section {', '.join(sorted(unknown))}; there are {', '.join(parts)}")
    sections = [say(section) for name in wanted for section in parts[name]()]
    for each in ranks.values():
        each.close()
    if not options.only:
        write("methods", title=TITLE, first=FIRST + (" **A quick run.**" if options.quick else ""), sections=sections)


def makers(ranks: Mapping[int, Ranks], options: argparse.Namespace) -> dict[str, Make]:
    """Sections by name, in the order of the page."""
    quick = options.quick
    shared = {degree: one for degree, one in ranks.items() if degree > 1}
    parts: dict[str, Make] = {
        "bytes": lambda: method_layers.bytes_sections(
            ranks, lengths=(256, 4096) if quick else (256, 1024, 4096, 8192), spec=NARROW
        ),
        "times": lambda: times(ranks, longest=2048 if quick else options.longest, quick=quick),
        "balance": lambda: [
            method_balance.work_section(),
            method_balance.time_section(shared, num_tokens=4096 if quick else 8192, rounds=1 if quick else 5),
        ],
        "reach": lambda: [
            method_reach.section(method_reach.LONG, ranks, title="Longest sequence: activations weigh", after=REACH),
            method_reach.section(method_reach.HEAVY, ranks, title="Longest sequence: weights weigh", after=HEAVY),
        ],
        "peers": lambda: [
            method_peers.section(shared, options.peers, {1024: 2} if quick else {1024: 9, 4096: 5, 8192: 3})
        ],
    }
    return {**parts, "gpu": lambda: [method_device.section()]} if options.gpu else parts


def times(ranks: Mapping[int, Ranks], *, longest: int, quick: bool) -> list[Section]:
    """A narrow layer on two and four ranks, a wide one on four, and who overtakes whom."""
    rounds = {length: 2 if quick else count for length, count in ROUNDS.items() if length <= longest}
    settings = [
        Setting(
            spec=NARROW, degree=2, rounds={length: count for length, count in rounds.items() if length <= TWO_RANKS}
        ),
        Setting(spec=NARROW, degree=4, rounds=rounds),
        Setting(spec=WIDE, degree=4, rounds={128: 2} if quick else {128: 7, 512: 5, 2048: 3}),
    ]
    method_layers.measure_times(settings, ranks)
    return [*map(method_layers.time_section, settings), method_layers.crossover_section(settings)]


if __name__ == "__main__":
    main()
