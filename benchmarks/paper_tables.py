"""Tables of the published systems, worked out again: published number, ours, the difference and why.

    python benchmarks/paper_tables.py [--quick] [--only table-1,table-2] [--check]

Nothing is trained: times are planned or simulated under published or closed-form costs. Writes paper_tables.md and
results/paper_tables.json.
"""

import argparse

import paper_configurations
import paper_dcp
import paper_hydraulis
import paper_paradyse
from pages import check, on_one_core, say, write

TITLE = "Tables of the published systems, reproduced"
FIRST = (
    "Nothing here was trained: step times are **planned or simulated** under published cost tables or our closed "
    "forms, solve times are measured on one core. Each row gives the published number, ours, the difference and why."
)
PARTS = {
    "table-1": paper_hydraulis.table_1,
    "table-2": paper_hydraulis.table_2,
    "table-3": paper_configurations.published_costs,
    "deepspeed": paper_configurations.closed_forms,
    "dcp-idle": paper_dcp.idle,
    "dcp": paper_dcp.speed_ups,
    "crossovers": paper_paradyse.crossovers,
    "ablation": paper_paradyse.ablation,
    "choices": paper_paradyse.choices,
}
"""Sections by name, in the order of the page."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer settings and steps; for a look")
    parser.add_argument("--only", default="", metavar="A,B", help="only these sections; writes no page")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the page has other numbers")
    options = parser.parse_args()
    on_one_core()
    wanted = options.only.split(",") if options.only else list(PARTS)
    if unknown := set(wanted) - set(PARTS):
        parser.error(f"no section {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    sections = [say(PARTS[name](quick=options.quick)) for name in wanted]
    if options.check:
        check("paper_tables", sections)
    elif not options.only:
        first = FIRST + (" **A quick run.**" if options.quick else "")
        write("paper_tables", title=TITLE, first=first, sections=sections)


if __name__ == "__main__":
    main()
