"""How the speed of `auto` over `static` falls as a step grows: docs/images/step-size.svg.

No torch; a minute and a half of one core.

    python benchmarks/step_size.py
"""

import json
from pathlib import Path

from pages import provenance

import lengthwise
from lengthwise.report.charts.svg import Chart
from lengthwise.report.pages.sweep_results import sweep_figure

MODEL, LENGTHS, CLUSTERS = "llama-13b", "commoncrawl", ("8x8xH100-80GB", "2x8xH100-80GB")
TOKENS = (200_000, 400_000, 800_000, 1_600_000, 4_000_000)
STEPS = 8
HERE = Path(__file__).parent
FIGURE = HERE.parent / "docs" / "images" / "step-size.svg"
WIDTH, HEIGHT = 760, 350
STYLE = (
    ":root{--paper:#fff;--ink:#16191d;--soft:#555c66;--rule:#dfe3e8;--s0:#2b7fc0;--s1:#dd8a1b}"
    "@media(prefers-color-scheme:dark){:root{--paper:#14171b;--ink:#e9ebee;--soft:#a7afba;--rule:#30363e;--s0:#4b9de0;"
    "--s1:#f0a848}}text{font:12px system-ui,'Segoe UI',Roboto,'DejaVu Sans',Arial,sans-serif;fill:var(--soft)}"
    ".axis-title,.key{fill:var(--ink)}.grid{stroke:var(--rule)}.chart{overflow:visible}"
    ".line{fill:none;stroke:var(--c);stroke-width:2;vector-effect:non-scaling-stroke}.dot,.box{fill:var(--c)}"
    ".s0{--c:var(--s0)}.s1{--c:var(--s1)}"
)


def picture(chart: Chart) -> str:
    """The chart with its legend, as a file that needs no page."""
    label = (
        f"Tokens per second of auto over static by tokens per step: {MODEL}, lengths like {LENGTHS}, H100s, simulated"
    )
    key = "".join(
        f'<rect x="{64 + 110 * k}" y="38" width="12" height="12" class="box {class_}"/>'
        f'<text x="{82 + 110 * k}" y="48" class="key">{words}</text>'
        for k, (class_, words) in enumerate(chart.legend)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT + 20}" '
        f'viewBox="0 0 {WIDTH} {HEIGHT + 20}" role="img" aria-label="{label}"><style>{STYLE}</style>'
        f'<rect width="100%" height="100%" rx="6" style="fill:var(--paper)"/>'
        f'<text x="64" y="24" class="key">{label}</text>{key}'
        f'<svg x="64" y="62" width="{WIDTH - 96}" height="{HEIGHT - 62}" style="overflow:visible">{chart.svg}</svg>'
        "</svg>\n"
    )


def main() -> None:
    """Compare, draw, and keep the numbers."""
    comparison = lengthwise.compare(
        LENGTHS, model=MODEL, cluster=CLUSTERS, policies=["static", "auto"], steps=STEPS, tokens_per_step=TOKENS
    )
    figure = sweep_figure(comparison.clusters)
    assert figure is not None and figure.chart is not None
    FIGURE.write_text(picture(figure.chart))
    rows = [dict(zip(figure.chart.columns, row)) for row in figure.chart.rows]
    (HERE / "results" / "step_size.json").write_text(json.dumps({**provenance(), "rows": rows}, indent=1) + "\n")
    print("\n".join(map(str, rows)))


if __name__ == "__main__":
    main()
