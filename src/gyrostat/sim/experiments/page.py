"""Findings as a page of Markdown, with plots in files beside it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gyrostat.sim.experiments.finding import Compared, Finding, TextTable
from gyrostat.sim.experiments.svg import draw

_INTRODUCTION = """# The papers' results, again

Written by `gyrostat experiment --all`; do not edit. Each section is one experiment, which `gyrostat experiment NAME` runs
alone. The same scheduler runs here as on real clusters, on virtual time (`gyrostat.sim`). What a paper leaves open is named
under *Setup*, and where our figure is not the paper's, *Why it differs* says so. "reached" compares with what this project
set itself as a target for the figure; a missed one is told.
"""


def write_page(findings: Sequence[Finding], page: Path) -> None:
    """The page, and `results/*.svg` beside it."""
    plots = page.parent / page.stem
    plots.mkdir(parents=True, exist_ok=True)
    for finding in findings:
        for plot in finding.plots:
            (plots / f"{plot.name}.svg").write_text(draw(plot))
    sections = [section(finding, plots.name) for finding in findings]
    page.write_text("\n".join([_INTRODUCTION, *sections]))


def section(finding: Finding, plots: str) -> str:
    parts = [f"## {finding.title}", f"`gyrostat experiment {finding.name}`", f"**Setup.** {finding.setup}"]
    parts.append(
        _table(TextTable("", ("figure", "paper", "ours", ""), [_row(each) for each in finding.compared]))
    )
    if finding.differs:
        parts.append(f"**Why it differs.** {finding.differs}")
    for table in finding.tables:
        parts.append(f"{table.title}\n\n{_table(table)}")
    parts += [f"![{plot.title}]({plots}/{plot.name}.svg)" for plot in finding.plots]
    return "\n\n".join(parts) + "\n"


def _row(each: Compared) -> tuple[str, str, str, str]:
    verdict = "" if each.reached is None else "reached" if each.reached else "**not reached**"
    return each.figure, each.paper, each.ours, verdict


def _table(table: TextTable) -> str:
    lines = [table.columns, ["---"] * len(table.columns), *table.rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
