"""`gyrostat simulate` as its users call it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.gyrostat_process import gyrostat

TRACE = "submitted,duration,devices,vc\n" + "".join(
    f"{10 * k},{100 + 7 * k % 50},{2 ** (k % 4)},{'ab'[k % 3 == 0]}\n" for k in range(40)
)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "jobs.csv"
    path.write_text(TRACE)
    return path


def test_it_needs_no_torch() -> None:
    program = (
        "import sys; import gyrostat.cli.simulate, gyrostat.sim.report; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


def test_policies_side_by_side_with_tenants_and_anomalies(trace: Path, tmp_path: Path) -> None:
    code, out, err = gyrostat(
        "simulate", "--cluster", "by-load:3", "--policy", "fifo", "--policy", "tiresias:queues=100", "--sharing", "quota",
        "--sharing", "cells", "--report", tmp_path / "out", trace, cwd=tmp_path,
    )  # fmt: skip
    assert code == 0, err
    shown = "\n".join(out)
    for expected in (
        "JCT mean",
        "p99",
        "queueing",
        "makespan",
        "utilisation",
        "preemptions",
        "fragmentation",
        "anomalies",
    ):
        assert expected in shown
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert [(run["policy"], run["sharing"]) for run in report["runs"]] == [
        ("fifo", "quota"),
        ("fifo", "cells"),
        ("tiresias:queues=100", "quota"),
        ("tiresias:queues=100", "cells"),
    ]
    for run in report["runs"]:
        assert run["all"]["jobs"] == 40
        assert set(run["tenants"]) == set(run["anomalies"]) == {"a", "b"}
        assert run["timelines"]["busy"]
    page = (tmp_path / "out" / "report.html").read_text()
    assert page.count("<svg") == 6
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")


def test_the_same_seed_gives_the_same_report_to_the_bit(trace: Path, tmp_path: Path) -> None:
    options = [
        "--cluster",
        "v100:3x8",
        "--failures",
        "0.2:0.02",
        "--serving",
        "v100:0-8",
        "--start-time",
        "3",
    ]
    texts = []
    for name in ("one", "two"):
        code, _, err = gyrostat(
            "simulate", *options, "--seed", "5", "--report", tmp_path / name, trace, cwd=tmp_path
        )
        assert code == 0, err
        texts.append((tmp_path / name / "report.json").read_text().replace(f"/{name} ", "/ "))
    assert texts[0] == texts[1]


def test_a_recording_replays_exactly_and_a_change_is_found(trace: Path, tmp_path: Path) -> None:
    code, _, err = gyrostat(
        "simulate", "--cluster", "by-load:3", "--no-private", "--record", "ticks.jsonl", trace, cwd=tmp_path
    )
    assert code == 0, err
    code, out, _ = gyrostat("simulate", "--replay", "ticks.jsonl", cwd=tmp_path)
    assert code == 0
    assert out[0].endswith("all plans equal")
    lines = (tmp_path / "ticks.jsonl").read_text().splitlines()
    lines[0] = lines[0].replace('"policy":"fifo"', '"policy":"fifo:backfill=yes"')
    (tmp_path / "other.jsonl").write_text("\n".join(lines) + "\n")
    code, out, _ = gyrostat("simulate", "--replay", "other.jsonl", cwd=tmp_path)
    assert code == 1
    assert "is decided otherwise" in out[0]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--cluster", "v100:3x8"], "simulate needs --cluster CLUSTER and a TRACE"),
        (["--cluster", "three", "jobs.csv"], "a cluster is written TYPE:NODESxDEVICES"),
        (["--cluster", "by-load:0", "jobs.csv"], "by-load:NODES, such as by-load:73"),
        (
            ["--cluster", "by-load:1", "jobs.csv"],
            "1 nodes are too few: the largest jobs of the 2 tenants need 2",
        ),
        (["--cluster", "nosuch.yaml", "jobs.csv"], "nosuch.yaml cannot be read"),
        (
            ["--cluster", "by-load:3", "--sharing", "some", "jobs.csv"],
            "--sharing is cells, quota, private, flat",
        ),
        (["--cluster", "by-load:3", "--policy", "x", "jobs.csv"], "there is no policy 'x'"),
        (["--cluster", "by-load:3", "--policy", "fifo;z=fifo", "jobs.csv"], "'z=fifo' names none of a, b"),
        (["--cluster", "v100:3x8", "--days", "3", "jobs.csv"], "--days is FROM-TO"),
        (["--cluster", "v100:3x8", "--serving", "k80:1-2", "jobs.csv"], "--serving is TYPE:LOW-HIGH"),
        (["--cluster", "v100:3x8", "--failures", "x", "jobs.csv"], "--failures is HOURS:HOURS"),
        (["--replay", "nosuch.jsonl"], "nosuch.jsonl cannot be read"),
    ],
)
def test_bad_input_is_refused(args: list[str], message: str, trace: Path, tmp_path: Path) -> None:
    code, _, err = gyrostat("simulate", *args, cwd=tmp_path)
    assert code == 2
    assert message in " ".join(" ".join(err).split())


def test_a_cell_file_and_policies_by_vc(trace: Path, tmp_path: Path) -> None:
    (tmp_path / "cells.yaml").write_text(
        """
cell_types:
  socket: {of: v100, count: 4}
  node: {of: socket, count: 2, node: true}
physical_cluster:
  - cell: node
    nodes: ["n[0-2]"]
virtual_clusters:
  a: {cells: {node: 2}}
  b: {cells: {node: 1}, weight: 2}
"""
    )
    code, out, err = gyrostat(
        "simulate", "--cluster", "cells.yaml", "--policy", "fifo;b=tiresias", trace, cwd=tmp_path
    )
    assert code == 0, err
    assert any("fifo;b=tiresias, cells" in line for line in out)
