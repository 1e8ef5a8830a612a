"""Experiments: those that take less than a second as they are, the others on a part of their input. Needs traces and tables."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from gyrostat.core.errors import UsageError
from gyrostat.sim.experiments import (
    easyscale_trace,
    elastic_tiresias,
    elastic_tiresias_why,
    gavel_mixed,
    hived_trace,
    hived_traces,
    registry,
)
from gyrostat.sim.experiments.finding import (
    Compared,
    ExperimentContext,
    ExperimentFinding,
    Plot,
    Series,
    TextTable,
    less,
)
from gyrostat.sim.experiments.page import write_page
from gyrostat.sim.experiments.svg import draw

DATA = Path(os.environ.get("GYROSTAT_DATA", Path(__file__).parents[4] / "shared" / "data"))
needs_data = pytest.mark.skipif(
    not DATA.exists(), reason=f"no traces and tables in {DATA}; set GYROSTAT_DATA"
)
QUICK = (
    "edl-16-jobs",
    "edl-transient",
    "easyscale-serving",
    "virtualflow-20-jobs",
    "virtualflow-3-jobs",
    "virtualflow-solver",
)


@needs_data
@pytest.mark.parametrize("name", QUICK)
def test_an_experiment_finds_the_same_every_time(name: str) -> None:
    lines: list[str] = []
    finding = registry.run(name, ExperimentContext(data=DATA, progress=lines.append))
    assert finding.name == name
    assert finding.compared
    assert finding == registry.run(name, ExperimentContext(data=DATA))


@needs_data
def test_elastic_beats_static_in_all_that_is_asked_of_it() -> None:
    """Figures that must not get lost by accident; what is not reached is listed in docs/results.md."""
    reached = {
        (name, each.figure): each.reached
        for name in QUICK
        for each in registry.run(name, ExperimentContext(data=DATA)).compared
        if each.reached
    }
    assert ("edl-transient", "elastic, of ideal, at least") in reached
    assert ("virtualflow-20-jobs", "median queueing") in reached
    assert ("virtualflow-20-jobs", "devices in use, elastic") in reached
    assert ("easyscale-serving", "time to refill, at most") in reached


@needs_data
def test_gavel_with_mixed_allocations_on_a_few_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gavel_mixed, "JOBS", 12)
    monkeypatch.setattr(gavel_mixed, "RATES", (2, 12))
    monkeypatch.setattr(gavel_mixed, "SEEDS", (1,))
    finding = gavel_mixed.run(ExperimentContext(data=DATA))
    assert all(each.reached for each in finding.compared)


@needs_data
def test_easyscale_on_a_few_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(easyscale_trace, "SWEEP", ((60, 4),))
    monkeypatch.setattr(easyscale_trace, "SHOWN", (60, 4))
    finding = easyscale_trace.run(ExperimentContext(data=DATA))
    faster = {each.figure: float(each.ours.split()[0]) for each in finding.compared}
    assert faster["mean JCT, homogeneous"] > 1.5
    assert faster["mean JCT, heterogeneous"] > 1.5


@needs_data
def test_other_traces_are_divided_and_shared_without_anomalies_in_cells(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        hived_traces, "TRACES", {"ITP 05": "itp/cluster05.csv", "ITP 10": "itp/cluster10.csv"}
    )
    finding = hived_traces.run(ExperimentContext(data=DATA))
    assert [each.reached for each in finding.compared] == [None, True, None, None]


def test_cells_claim_only_what_they_have_removed() -> None:
    assert hived_trace.removed(5.0, 0.0) is True
    assert hived_trace.removed(0.0, 0.0) is None
    assert hived_trace.removed(5.0, 0.1) is False


@needs_data
def test_static_and_dynamic_binding_on_a_day(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hived_trace, "DAYS", (30, 31))
    finding = registry.run("hived-binding", ExperimentContext(data=DATA))
    static, dynamic = (int(row[3]) for row in finding.tables[0].rows[:2])
    lost = [sum(devices for _, devices in series.points) for series in finding.plots[0].series]
    assert lost == [static, dynamic]


@needs_data
def test_what_decides_the_gain_of_elastic_tiresias(monkeypatch: pytest.MonkeyPatch) -> None:
    why = elastic_tiresias_why
    monkeypatch.setattr(why, "EVERY", 80)
    monkeypatch.setattr(why, "VARIANTS", (why.AS_IT_IS, why.Variant(name="inelastic", inelastic=1.0)))
    finding = why.run(ExperimentContext(data=DATA))
    gains = [float(row[4].split()[0]) for row in finding.tables[0].rows]
    assert gains[0] > 5
    assert gains[1] == 0.0


@needs_data
def test_elastic_tiresias_on_the_first_jobs_of_philly(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = elastic_tiresias.philly_jobs
    monkeypatch.setattr(
        elastic_tiresias, "philly_jobs", lambda path, *, elastic: whole(path, elastic=elastic, most=1500)
    )
    monkeypatch.setattr(elastic_tiresias, "NODES", 6)
    finding = elastic_tiresias.run(ExperimentContext(data=DATA))
    before, after = (row[1] for row in finding.tables[0].rows)
    assert float(after.rstrip(" s").replace(",", "")) < float(before.rstrip(" s").replace(",", ""))


def test_unknown_names_and_missing_files_are_errors(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no experiment 'nonsense'; there are elastic-tiresias"):
        registry.run("nonsense", ExperimentContext(data=tmp_path))
    with pytest.raises(UsageError, match="needs it; give its directory with --data"):
        registry.run("virtualflow-3-jobs", ExperimentContext(data=tmp_path))


FINDING = ExperimentFinding(
    name="n",
    title="A title",
    setup="So it was.",
    compared=[
        Compared("speed", "2 x", "3 x", True),
        Compared("cost", "1", "2", False),
        Compared("colour", "red", "blue"),
    ],
    differs="Because.",
    tables=[TextTable("Rows", ("a", "b"), [("1", "2")])],
    plots=[
        Plot(
            name="p",
            title="<Lines>",
            x="s",
            y="devices",
            series=[Series("a & b", [(0, 0), (5, 3)], steps=True)],
        ),
        Plot(
            name="q", title="Bars", x="n", y="v", bars=["1", "2"], series=[Series("a", [(1, 0.5), (2, 2.0)])]
        ),
        Plot(
            name="r",
            title="Log",
            x="s",
            y="share",
            log_x=True,
            series=[Series("a", [(0.0, 0), (3, 0.5), (4000, 1)])],
        ),
    ],
)


def test_a_page_has_every_finding_and_its_plots(tmp_path: Path) -> None:
    write_page([FINDING], tmp_path / "results.md")
    page = (tmp_path / "results.md").read_text()
    assert (
        "| speed | 2 x | 3 x | reached |\n| cost | 1 | 2 | **not reached** |\n| colour | red | blue |  |"
        in page
    )
    assert "**Why it differs.** Because." in page
    for plot in FINDING.plots:
        assert f"](results/{plot.name}.svg)" in page
        assert (tmp_path / "results" / f"{plot.name}.svg").read_text() == draw(plot)


def test_one_experiment_run_again_replaces_its_own_section(tmp_path: Path) -> None:
    page = tmp_path / "results.md"
    first = replace(FINDING, name="edl-16-jobs", title="Sixteen", plots=[])
    second = replace(FINDING, name="gavel-mixed", title="Mixed", plots=[])
    write_page([second], page)
    write_page([first], page)
    write_page([replace(second, setup="So it is now.")], page)
    text = page.read_text()
    assert [line for line in text.splitlines() if line.startswith("## ")] == ["## Sixteen", "## Mixed"]
    assert (text.count("So it was."), text.count("So it is now.")) == (1, 1)
    write_page([first], page)
    assert page.read_text() == text


def test_plots_are_well_formed_and_inside_their_frame() -> None:
    for plot in FINDING.plots:
        root = ElementTree.fromstring(draw(plot))
        _, _, width, height = (float(number) for number in root.attrib["viewBox"].split())
        for element in root.iter():
            for name, limit in (("x", width), ("x2", width), ("y", height), ("y2", height)):
                assert 0 <= float(element.attrib.get(name, 0)) <= limit


def test_less() -> None:
    assert less(200.0, 50.0) == 75.0
    assert less(0.0, 5.0) == 0.0
