"""Cell files: what is read, and every error with its line."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from gyrostat.core.errors import UsageError
from gyrostat.sched.cells.file import CellFile, schema
from gyrostat.sched.cells.load import expand, load, parse
from gyrostat.sched.cells.spec import (
    CellQuota,
    CellSpec,
    Hierarchy,
    TopCell,
    VirtualCluster,
    validated,
)

EXAMPLE = Path(__file__).parents[3] / "examples/clusters/cells.yaml"

GOOD = """\
cell_types:
  rack: {of: node, count: 2}
  node: {of: switch, count: 2, node: true}
  switch: {of: gpu, count: 2}
physical_cluster:
  - cell: rack
    nodes: ["n[0-3]"]
  - cell: node
    nodes: [spare]
virtual_clusters:
  a:
    cells:
      rack: 1
      switch: 1
  b:
    weight: 2
    cells:
      node: 1
    pinned:
      fast: {cell: switch, at: n3/2}
priorities: {low: 0, high: 5}
"""


def problems_of(text: str) -> list[str]:
    """Every problem of a file."""
    spec, problems = parse(text)
    assert (spec is None) == bool(problems)
    return [str(problem) for problem in problems]


def test_a_file_becomes_a_spec() -> None:
    spec, problems = parse(GOOD)
    assert problems == []
    assert spec is not None
    (rack,) = spec.hierarchies
    assert rack == Hierarchy(("gpu", "switch", "node", "rack"), (1, 2, 4, 8), 2)
    assert spec.top_cells == (
        TopCell("rack", 3, ("n0", "n1")),
        TopCell("rack", 3, ("n2", "n3")),
        TopCell("rack", 2, ("spare",)),
    )
    a, b = spec.virtual_clusters
    assert a.cells == (CellQuota("rack", 3, 1), CellQuota("rack", 1, 1))
    assert (b.weight, b.pinned[0].at) == (2, "n3/2")
    assert spec.priorities == {"low": 0, "high": 5}
    assert spec.layouts["rack"].nodes == ("n0", "n1", "n2", "n3", "spare", None)


def test_priorities_have_names() -> None:
    spec, _ = parse(GOOD)
    assert spec is not None
    assert [spec.priority(name) for name in ("low", "high", "opportunistic", "7")] == [0, 5, -1, 7]
    with pytest.raises(
        UsageError, match="no priority 'hgih'; there are opportunistic, low, high, and numbers from 0"
    ):
        spec.priority("hgih")


def test_the_example_is_sound_and_fits_the_schema() -> None:
    assert len(load(EXAMPLE).virtual_clusters) == 3
    described = schema()["$defs"]
    assert set(described["CellFile"]["properties"]) == {
        field.name for field in msgspec.structs.fields(CellFile)
    }
    for name in ("CellFile", "CellTypeEntry", "TopCellEntry", "PinnedEntry", "VirtualClusterEntry"):
        assert described[name]["additionalProperties"] is False
        assert all("description" in field for field in described[name]["properties"].values())


def test_the_assignment_of_the_papers_figure_3_fits() -> None:
    """One rack of four machines of eight; A and B have a socket, a switch and a device, C two machines and a switch."""
    types = ("gpu", "switch", "socket", "node", "rack")
    hierarchy = Hierarchy(types, (1, 2, 4, 8, 32), 3)
    small = tuple(CellQuota("rack", level, 1) for level in (2, 1, 0))
    tenants = (
        VirtualCluster("A", small),
        VirtualCluster("B", small),
        VirtualCluster("C", (CellQuota("rack", 3, 2), CellQuota("rack", 1, 1))),
    )
    rack = TopCell("rack", 4, ("n0", "n1", "n2", "n3"))
    validated(CellSpec((hierarchy,), (rack,), tenants))
    too_much = (*tenants, VirtualCluster("D", (CellQuota("rack", 3, 1),)))
    with pytest.raises(
        UsageError, match=r"virtual cluster D is 1 short of its 1 node cells \(level 4\)|C is 1 short"
    ):
        validated(CellSpec((hierarchy,), (rack,), too_much))


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("n7", ["n7"]),
        ("n[0-2]", ["n0", "n1", "n2"]),
        ("n[08-10].x", ["n08.x", "n09.x", "n10.x"]),
        ("10.0.1.4~6", ["10.0.1.4", "10.0.1.5", "10.0.1.6"]),
        ("r[0-1]n[0-1]", ["r0n0", "r0n1", "r1n0", "r1n1"]),
        ("n[3-1]", []),
        ("n[0-99999999999]", []),
    ],
)
def test_names_of_machines_are_expanded(pattern: str, names: list[str]) -> None:
    assert expand(pattern) == names


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (
            "count: 2, node: true",
            "count: 2",
            ["line 2: exactly one type of the hierarchy rack must be a machine (`node: true`), found: none"],
        ),
        (
            "{of: gpu, count: 2}",
            "{of: gpu, count: 2, node: true}",
            [
                "line 3: exactly one type of the hierarchy rack must be a machine (`node: true`), found: switch, node"
            ],
        ),
        (
            "{of: gpu, count: 2}",
            "{of: gpu, count: 0}",
            ["line 4: cell_types.switch.count 0: Expected `int` >= 1"],
        ),
        ("{of: gpu, count: 2}", "{of: rack, count: 2}", ["line 2: rack is part of itself"]),
        (
            "  switch: {of",
            "  room: {of: node, count: 4}\n  switch: {of",
            [
                "line 4: node is part of both rack and room: cells of a level must be equal; "
                "give one of them types of its own"
            ],
        ),
        (
            "cell: rack",
            "cell: rock",
            ["line 6: there is no cell type 'rock'; there are gpu, switch, node, rack"],
        ),
        (
            "cell: node\n",
            "cell: switch\n",
            ["line 8: switch is smaller than a machine (node); name whole machines"],
        ),
        (
            '"n[0-3]"',
            '"n[0-4]"',
            ["line 7: a rack has 2 machines, so their number must be a multiple of that; there are 5"],
        ),
        (
            "[spare]",
            "[n2]",
            [
                "line 9: a node has 1 machines, so their number must be a multiple of that; there are 0",
                "line 9: machine n2 is here twice; the first is in line 7",
            ],
        ),
        (
            "[spare]",
            "['a b']",
            [
                "line 9: 'a b' names no machines; write node7, node[0-7] or 10.0.1.0~7",
                "line 9: a node has 1 machines, so their number must be a multiple of that; there are 0",
            ],
        ),
        (
            "nodes: [spare]",
            "nodes: spare",
            ["line 9: physical_cluster.1.nodes 'spare': Expected `array`, got `str`"],
        ),
        (
            "      rack: 1",
            "      rack: 3",
            [
                "line 13: virtual cluster a is 2 short of its 3 rack cells (level 4): all tenants together have 3, and "
                "beside their larger cells and pinned ones the physical cluster has room for 1"
            ],
        ),
        ("weight: 2", "weight: 0", ["line 16: virtual_clusters.b.weight 0: Expected `float` > 0.0"]),
        (
            "weight: 2",
            "wieght: 2",
            ["line 16: virtual_clusters.b has no 'wieght'; it has cells, pinned, servers, weight"],
        ),
        (
            "at: n3/2",
            "at: n3",
            [
                "line 20: pinned cell fast: no switch at 'n3' in the physical cluster; "
                "for a cell within a machine name a device: NODE/0"
            ],
        ),
        (
            "at: n3/2",
            "at: n3/4",
            [
                "line 20: pinned cell fast: no switch at 'n3/4' in the physical cluster; "
                "for a cell within a machine name a device: NODE/0"
            ],
        ),
        (
            "{cell: switch, at: n3/2}",
            "{cell: switch}",
            ["line 20: virtual_clusters.b.pinned.fast needs 'at'"],
        ),
        (
            "{cell: switch, at: n3/2}",
            "{cell: rack, at: spare}",
            ["line 20: pinned cell fast: 'spare' is not part of a whole rack"],
        ),
        (
            "      fast",
            "      slow: {cell: node, at: n3}\n      fast",
            ["line 21: pinned cell fast of b overlaps slow of b"],
        ),
        ("{low: 0, high: 5}", "{low: -1}", ["line 21: priorities.low -1: Expected `int` >= 0"]),
        ("  b:\n", "  a:\n", ["line 15: 'a' is here twice; the first is in line 11"]),
        ("cell_types:\n", "cell_types: [\n", ["line 3: not YAML: expected ',' or ']', but got '<scalar>'"]),
    ],
)
def test_every_error_has_its_line_and_reason(old: str, new: str, expected: list[str]) -> None:
    assert old in GOOD
    assert problems_of(GOOD.replace(old, new, 1)) == expected


def test_all_errors_are_reported_at_once() -> None:
    text = (
        GOOD.replace("weight: 2", "weight: heavy")
        .replace("cell: rack", "cell: rock")
        .replace("node: 1", "nodes: 1")
    )
    assert [line.split(":")[0] for line in problems_of(text)] == ["line 6", "line 16", "line 18"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "7",
        "[]",
        "a: &a [*a]",
        "a: &a [1,1,1,1,1,1,1,1,1]\nb: &b [*a,*a,*a,*a,*a,*a,*a,*a]\nc: [*b,*b,*b,*b]",
        "cell_types: &x {y: *x}",
        "\t",
        "cell_types: {}\nx: !!python/object:os.system {}",
    ],
)
def test_anything_else_is_refused_not_obeyed(text: str) -> None:
    assert problems_of(text)


def test_two_hierarchies_may_share_a_device_type_if_cells_say_which() -> None:
    text = """\
cell_types:
  big: {of: gpu, count: 4, node: true}
  small: {of: gpu, count: 2, node: true}
physical_cluster:
  - {cell: big, nodes: [b0]}
  - {cell: small, nodes: [s0]}
virtual_clusters:
  a:
    cells: {gpu: 1}
"""
    assert problems_of(text) == ["line 9: gpu is in several hierarchies; write big/gpu or small/gpu"]
    spec, problems = parse(text.replace("{gpu: 1}", "{small/gpu: 1}"))
    assert problems == []
    assert spec is not None
    assert spec.virtual_clusters[0].cells == (CellQuota("small", 0, 1),)


def test_a_file_that_cannot_be_read_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        load(tmp_path / "none.yaml")
    (tmp_path / "bad.yaml").write_text(GOOD.replace("weight: 2", "weight: 0"))
    with pytest.raises(UsageError, match=r"bad.yaml:16: virtual_clusters.b.weight"):
        load(tmp_path / "bad.yaml")
