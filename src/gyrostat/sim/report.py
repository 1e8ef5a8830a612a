"""A directory with the results of simulations: `report.json`, and `report.html`, a page without further files."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from gyrostat.core.errors import UsageError
from gyrostat.sim.experiments.finding import Plot, Series
from gyrostat.sim.experiments.svg import draw
from gyrostat.sim.records import Curve
from gyrostat.sim.simulate import SimulationResult
from gyrostat.sim.summary import Summary

_STYLE = """
body { font-family: sans-serif; max-width: 60em; margin: 2em auto; color: #222; }
table { border-collapse: collapse; margin: 1em 0; } th, td { padding: 0.2em 0.8em; text-align: right; }
th:first-child, td:first-child { text-align: left; } tr:nth-child(even) { background: #f4f4f4; }
svg { width: 100%; height: auto; margin: 0.5em 0; }
"""
_CDF_POINTS = 200
_DAY = 86_400.0


@dataclass(frozen=True)
class ReportedRun:
    """One simulation and its figures."""

    summary: Summary
    result: SimulationResult

    @property
    def name(self) -> str:
        return f"{self.summary.policy}, {self.summary.sharing}"


def write_report(directory: Path, title: str, runs: Sequence[ReportedRun], command: str) -> Path:
    """Returns the page's path."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        page = directory / "report.html"
        data = {"title": title, "command": command, "runs": [_as_json(run) for run in runs]}
        (directory / "report.json").write_text(json.dumps(data, indent=1) + "\n")
        page.write_text(html(title, runs, command))
    except OSError as error:
        raise UsageError(f"the report cannot be written to {directory}: {error.strerror}") from error
    return page


def table(runs: Sequence[ReportedRun]) -> tuple[list[str], list[list[str]]]:
    """The figures of all runs as text, for the terminal and the page: one column per run, all times in one unit."""
    totals = [run.summary.all for run in runs]
    times = {
        "JCT mean": [one.jct_mean for one in totals],
        "JCT median": [one.jct_median for one in totals],
        "JCT p95": [one.jct_p95 for one in totals],
        "JCT p99": [one.jct_p99 for one in totals],
        "queueing mean": [one.queueing_mean for one in totals],
        "queueing median": [one.queueing_median for one in totals],
    }
    if any(one.jobs for one in totals):
        times["makespan"] = [run.summary.makespan for run in runs]
    unit = TimeUnit.of([value for values in times.values() for value in values])
    jobs = [
        f"{run.summary.all.jobs}"
        + (f" (+{run.summary.unfinished} unfinished)" if run.summary.unfinished else "")
        for run in runs
    ]
    rows = [["jobs", *jobs]]
    for name, values in times.items():
        finished = zip(values, totals, strict=True)
        rows.append([name, *(unit.text(value) if one.jobs else "-" for value, one in finished)])
    rows += [
        ["utilisation", *(f"{100 * run.summary.utilisation:.1f} %" for run in runs)],
        ["preemptions", *(f"{one.preemptions}" for one in totals)],
        ["fragmentation", *(f"{100 * run.summary.fragmentation:.1f} %" for run in runs)],
    ]
    if any(run.summary.anomalies for run in runs):
        suffering = [sum(each.suffered for each in run.summary.anomalies.values()) for run in runs]
        numbers = zip(suffering, runs, strict=True)
        texts = [
            f"{some} of {len(run.summary.anomalies)}" if run.summary.anomalies else ""
            for some, run in numbers
        ]
        rows.append(["anomalies", *texts])
    return ["", *(run.name for run in runs)], rows


@dataclass(frozen=True)
class TimeUnit:
    """The unit of all times of one table."""

    name: str
    seconds: float
    digits: int

    @classmethod
    def of(cls, values: Iterable[float]) -> TimeUnit:
        """Hours, minutes or seconds, by the longest time."""
        longest = max(values, default=0.0)
        if longest >= 2 * 3600:
            return cls("h", 3600.0, 2)
        return cls("min", 60.0, 1) if longest >= 600 else cls("s", 1.0, 0)

    def text(self, value: float) -> str:
        return f"{value / self.seconds:,.{self.digits}f} {self.name}"


def tenant_table(runs: Sequence[ReportedRun]) -> tuple[list[str], list[list[str]]]:
    """Mean queueing time of each tenant in each run; marked where it is longer than in a private cluster."""
    tenants = sorted({vc for run in runs for vc in run.summary.tenants})
    unit = TimeUnit.of(one.queueing_mean for run in runs for one in run.summary.tenants.values())
    rows = []
    for vc in tenants:
        row = [vc, str(max(run.summary.tenants[vc].jobs for run in runs if vc in run.summary.tenants))]
        for run in runs:
            figures, anomaly = run.summary.tenants.get(vc), run.summary.anomalies.get(vc)
            mark = " !" if anomaly is not None and anomaly.suffered else ""
            row.append("" if figures is None else unit.text(figures.queueing_mean) + mark)
        rows.append(row)
    return ["tenant", "jobs", *(run.name for run in runs)], rows


def html(title: str, runs: Sequence[ReportedRun], command: str) -> str:
    plots = [
        _timeline("devices in use", "devices", [(run.name, run.result.records.busy) for run in runs]),
        _timeline("jobs that wait", "jobs", [(run.name, run.result.records.waiting) for run in runs]),
        _timeline(
            "nodes that a guaranteed job could not have as a whole", "nodes",
            [(run.name, run.result.records.broken) for run in runs],
        ),
        _cdf("completion times", runs, waits=False),
        _cdf("queueing", runs, waits=True),
        _per_tenant(runs),
    ]  # fmt: skip
    parts = [
        "<!DOCTYPE html>",
        f'<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title><style>{_STYLE}</style></head><body>',
        f"<h1>{escape(title)}</h1><p><code>{escape(command)}</code></p>",
        _html_table(*table(runs)),
        *(draw(plot) for plot in plots),
        "<h2>Tenants: mean queueing</h2><p>! longer than in a private cluster</p>",
        _html_table(*tenant_table(runs)),
        "</body></html>\n",
    ]
    return "\n".join(parts)


def _as_json(run: ReportedRun) -> dict[str, object]:
    # File format: report.json and `gyrostat simulate --json` have these members, and the fields of `Summary`.
    records = run.result.records
    return {
        **run.summary.to_json(),
        "timelines": {
            "busy": records.busy.points(),
            "lent": records.lent.points(),
            "waiting": records.waiting.points(),
            "broken_nodes": records.broken.points(),
        },
        "unfinished_jobs": list(run.result.unfinished),
    }


def _timeline(title: str, unit: str, curves: Sequence[tuple[str, Curve]]) -> Plot:
    series = [Series(name, [(at / _DAY, value) for at, value in curve.points()]) for name, curve in curves]
    return Plot(name=title.replace(" ", "-"), title=title, x="days", y=unit, series=series)


def _cdf(title: str, runs: Sequence[ReportedRun], *, waits: bool) -> Plot:
    series = []
    for run in runs:
        records = run.result.records
        values = sorted(
            records.waited[row] if waits else records.finished[row] - records.submitted[row]
            for row in range(len(records))
        )
        chosen = range(0, len(values), max(1, len(values) // _CDF_POINTS))
        series.append(Series(run.name, [(max(values[k], 1.0) / 60, (k + 1) / len(values)) for k in chosen]))
    return Plot(
        name=title.replace(" ", "-"), title=title, x="minutes", y="share of jobs", series=series, log_x=True
    )


def _per_tenant(runs: Sequence[ReportedRun]) -> Plot:
    tenants = sorted({vc for run in runs for vc in run.summary.tenants})
    series = [
        Series(
            run.name,
            [
                (k, run.summary.tenants[vc].queueing_mean / 3600 if vc in run.summary.tenants else 0.0)
                for k, vc in enumerate(tenants)
            ],
        )
        for run in runs
    ]
    return Plot(
        name="tenants", title="mean queueing by tenant", x="tenant", y="hours", series=series, bars=tenants
    )


def _html_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def line(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    return "<table>" + line(head, "th") + "".join(line(row, "td") for row in rows) + "</table>"
