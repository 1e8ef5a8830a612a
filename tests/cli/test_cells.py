"""`gyrostat cells` as its users start it."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cli.gyrostat_process import gyrostat

EXAMPLE = Path(__file__).parents[2] / "examples/clusters/cells.yaml"


def test_a_sound_file_is_said_to_be_sound(tmp_path: Path) -> None:
    code, out, err = gyrostat("cells", "check", EXAMPLE, cwd=tmp_path)
    assert (code, err) == (0, [])
    assert out == [
        f"{EXAMPLE} is valid: 64 v100 devices on 8 machines, 16 p100 devices on 4 machines, 3 virtual clusters"
    ]


def test_every_error_is_reported_with_its_line(tmp_path: Path) -> None:
    text = EXAMPLE.read_text()
    (tmp_path / "c.yaml").write_text(
        text.replace("p100-node: 2", "p100-node: 4").replace("v100-node: 2,", "v100-node: 5,")
    )
    code, out, err = gyrostat("cells", "check", "c.yaml", cwd=tmp_path)
    assert (code, err) == (2, ["gyrostat: error: c.yaml has 4 errors"])
    assert [line.partition(" cells")[0] for line in out] == [
        "c.yaml:18: virtual cluster vision is 1 short of its 1 v100-switch",
        "c.yaml:20: virtual cluster speech is 2 short of its 2 v100",
        "c.yaml:20: virtual cluster speech is 2 short of its 5 v100-node",
        "c.yaml:22: virtual cluster search is 1 short of its 4 p100-node",
    ]


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    for verb in ("check", "show"):
        code, out, err = gyrostat("cells", verb, "none.yaml", cwd=tmp_path)
        assert (code, out) == (2, [])
        assert err == ["gyrostat: error: none.yaml cannot be read: No such file or directory"]


def test_a_cluster_is_drawn(tmp_path: Path) -> None:
    code, out, err = gyrostat("cells", "show", EXAMPLE, cwd=tmp_path)
    assert (code, err) == (0, [])
    assert out[0] == "v100-rack: 8 machines, 64 v100 devices"
    drawn = "\n".join(out)
    assert "level 4: v100-node = 2 x v100-socket, 8 devices, a machine" in drawn
    assert "v100-node at v3 is pinned: search/index" in drawn
    row = next(line for line in out if line.strip().startswith("vision"))
    cells = "1 x v100-rack, 1 x v100-switch, 1 x p100-node"
    assert " ".join(row.split()) == f"vision 2 {cells} 34 v100 + 4 p100"
    assert out[-1] == "priorities: opportunistic < batch (0) < normal (10) < urgent (20)"


def test_of_many_machines_only_some_are_drawn(tmp_path: Path) -> None:
    (tmp_path / "many.yaml").write_text(
        "cell_types: {node: {of: gpu, count: 2, node: true}}\n"
        "physical_cluster: [{cell: node, nodes: ['n[0-999]']}]\n"
        "virtual_clusters: {a: {pinned: {mine: {cell: node, at: n700}}}}\n"
    )
    code, out, err = gyrostat("cells", "show", "many.yaml", cwd=tmp_path)
    assert (code, err) == (0, [])
    assert len(out) < 30
    assert any("node at n700 is pinned: a/mine" in line for line in out)
    assert any("… 1,000 top cells in all" in line for line in out)


def test_the_schema_is_json(tmp_path: Path) -> None:
    code, out, err = gyrostat("cells", "schema", cwd=tmp_path)
    assert (code, err) == (0, [])
    assert json.loads("\n".join(out))["$ref"] == "#/$defs/CellFile"
