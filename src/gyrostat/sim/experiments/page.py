"""Findings as a Markdown page with plots in separate files. Running one experiment again replaces its section only."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from gyrostat.sim.experiments.finding import Compared, ExperimentFinding, TextTable
from gyrostat.sim.experiments.registry import EXPERIMENTS
from gyrostat.sim.experiments.svg import draw

_INTRODUCTION = """# The papers' results, again

Written by `gyrostat experiment --all`; do not edit. Each section is one experiment, which `gyrostat experiment NAME --page
docs/results.md` runs and writes alone. The same scheduler runs here as on real clusters, on virtual time (`gyrostat.sim`).
What a paper leaves open is named under *Setup*, and where our figure is not the paper's, *Why it differs* says so. "reached"
compares with what this project set itself as a target for the figure; a figure that was missed is marked.
"""


_NAME = re.compile(r"^`gyrostat experiment (\S+)`$", re.MULTILINE)


def write_page(findings: Sequence[ExperimentFinding], page: Path) -> None:
    """The page, and `results/*.svg` beside it. Sections of other experiments that it already has are kept."""
    plots = page.parent / page.stem
    plots.mkdir(parents=True, exist_ok=True)
    for finding in findings:
        for plot in finding.plots:
            (plots / f"{plot.name}.svg").write_text(draw(plot))
    sections = _sections(page)
    sections |= {finding.name: section(finding, plots.name) for finding in findings}
    known = list(EXPERIMENTS)
    order = sorted(sections, key=lambda name: known.index(name) if name in known else len(known))
    page.write_text("\n".join([_INTRODUCTION, *(sections[name] for name in order)]))


def _sections(page: Path) -> dict[str, str]:
    """The sections of an existing page, by the experiment's name."""
    if not page.exists():
        return {}
    parts = re.split(r"^(?=## )", page.read_text(), flags=re.MULTILINE)[1:]
    return {match[1]: part.rstrip("\n") + "\n" for part in parts if (match := _NAME.search(part))}


def section(finding: ExperimentFinding, plots: str) -> str:
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
