"""`gyrostat simulate` as its users call it."""

from __future__ import annotations

import json
import os
import re
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


def test_a_job_that_never_fits_has_no_completion_time(tmp_path: Path) -> None:
    (tmp_path / "jobs.csv").write_text("submitted,duration,devices\n0,10,64\n")
    code, out, err = gyrostat("simulate", "--cluster", "v100:1x8", tmp_path / "jobs.csv", cwd=tmp_path)
    assert code == 0, err
    rows = {line.split("  ")[0].strip(): line.split()[-1] for line in out if line.strip()}
    assert "0 (+1 unfinished)" in "\n".join(out)
    assert {rows[name] for name in ("JCT mean", "JCT p99", "queueing mean")} == {"-"}


def test_times_of_a_table_have_one_unit(tmp_path: Path) -> None:
    (tmp_path / "jobs.csv").write_text("submitted,duration,devices\n0,30,8\n1,86400,8\n")
    code, out, err = gyrostat("simulate", "--cluster", "v100:1x8", tmp_path / "jobs.csv", cwd=tmp_path)
    assert code == 0, err
    rows = {line.split("  ")[0].strip(): line.split()[-2:] for line in out if line.strip()}
    assert rows["JCT median"] == ["0.01", "h"]
    assert rows["makespan"] == ["24.01", "h"]


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


@pytest.mark.parametrize(
    "options",
    [
        ["--cluster", "mixed.yaml", "--policy", "tiresias:queues=100", "--failures", "0.2:0.02"],
        [
            "--cluster",
            "mixed.yaml",
            "--policy",
            "elastic-tiresias:queues=100,crowd=1",
            "--serving",
            "v100:0-4",
        ],
        ["--cluster", "v100:2x4,p100:2x4", "--policy", "easyscale", "--overhead", "0.1"],
    ],
)
def test_the_order_of_hashes_has_no_influence(options: list[str], tmp_path: Path) -> None:
    """In two processes that hash strings otherwise: the same ticks and the same report, byte for byte."""
    (tmp_path / "mixed.yaml").write_text(MIXED)
    rows = [
        f"{9 * k},{100 + 7 * k % 50},{2 ** (k % 4)},{'ab'[k % 3 == 0]},1,8,{'yes' if k % 2 else 'no'},soft"
        for k in range(40)
    ]
    head = "submitted,duration,devices,vc,min_devices,max_devices,mixes_types,affinity"
    (tmp_path / "jobs.csv").write_text("\n".join([head, *rows]) + "\n")
    found = []
    for seed in ("1", "2"):
        code, _, err = gyrostat(
            "simulate", *options, "--no-private", "--record", "ticks.jsonl", "--report", "out", "jobs.csv",
            cwd=tmp_path, env={"PYTHONHASHSEED": seed},
        )  # fmt: skip
        assert code == 0, err
        found.append([(tmp_path / name).read_bytes() for name in ("ticks.jsonl", "out/report.json")])
    assert found[0] == found[1]


MIXED = """
cell_types:
  v100-node: {of: v100, count: 4, node: true}
  p100-node: {of: p100, count: 4, node: true}
physical_cluster:
  - {cell: v100-node, nodes: ["v[0-3]"]}
  - {cell: p100-node, nodes: ["p[0-3]"]}
virtual_clusters:
  a: {cells: {v100-node: 2, p100-node: 2}}
  b: {cells: {v100-node: 2, p100-node: 1}}
"""


def test_a_policy_of_an_installed_package(trace: Path, tmp_path: Path) -> None:
    """What pip leaves behind: a module, and a .dist-info that names its entry points."""
    documented = (Path(__file__).parents[2] / "docs/reference/policies.md").read_text()
    (source,) = re.findall(r"```python\n(.*?)```", documented, re.DOTALL)
    (tmp_path / "site/my_package").mkdir(parents=True)
    (tmp_path / "site/my_package/shortest.py").write_text(source)
    (points,) = re.findall(r"```toml\n\[project.entry-points.\"(.*?)\"\]\n(.*?)```", documented, re.DOTALL)
    info = tmp_path / "site/my_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-package\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{points[0]}]\n{points[1].replace(chr(34), '')}")
    path = os.pathsep.join([str(tmp_path / "site"), os.environ.get("PYTHONPATH", "")])
    code, out, err = gyrostat(
        "simulate", "--cluster", "v100:3x8", "--policy", "shortest:patience=3600", trace,
        cwd=tmp_path, env={"PYTHONPATH": path},
    )  # fmt: skip
    assert code == 0, err
    assert any("shortest:patience=3600" in line for line in out)


def test_a_scheduler_learns_how_fast_jobs_really_are(tmp_path: Path) -> None:
    """P100s are a tenth as fast as expected: a scheduler that measures takes them from the job that has no use for them."""
    for name, p100 in (("expected", 3.0), ("real", 0.3)):
        profile = {"workload": "w", "throughput": {"v100": {"1": 4.0}, "p100": {"1": p100}}}
        (tmp_path / f"{name}.json").write_text(json.dumps(profile))
    (tmp_path / "jobs.csv").write_text(
        "id,submitted,duration,devices,min_devices,types,mixes_types,workload,virtual_workers,affinity\n"
        "b,0,100,4,,p100,no,w (batch size 1),4,soft\n"
        "a,0,200,8,0,,yes,w (batch size 1),8,soft\n"
    )
    found = []
    for extra in ([], ["--truth", "real.json", "--measure-after", "1e9"], ["--truth", "real.json"]):
        code, _, err = gyrostat(
            "simulate", "--cluster", "v100:1x4,p100:1x4", "--policy", "easyscale", "--profiles", "expected.json",
            *extra, "--report", "out", "jobs.csv", cwd=tmp_path,
        )  # fmt: skip
        assert code == 0, err
        run = json.loads((tmp_path / "out/report.json").read_text())["runs"][0]
        found.append((run["makespan"], run["utilisation"]))
    assert found == [(300.0, 1.0), (400.0, 1.0), (400.0, pytest.approx((8 * 130 + 4 * 270) / 3200))]


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
    assert "s differs" in out[0]


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
        (
            ["--cluster", "v100:3x8", "--measure-after", "5", "jobs.csv"],
            "--measure-after 5 needs --truth FILE",
        ),
        (["--cluster", "v100:3x8", "--truth", "nosuch.json", "jobs.csv"], "nosuch.json cannot be read"),
        (["--replay", "nosuch.jsonl"], "nosuch.jsonl cannot be read"),
    ],
)
def test_bad_input_is_refused(args: list[str], message: str, trace: Path, tmp_path: Path) -> None:
    code, _, err = gyrostat("simulate", *args, cwd=tmp_path)
    assert code == 2
    assert message in " ".join(" ".join(err).split())


def test_pinned_cells_are_left_to_jobs_that_request_them(tmp_path: Path) -> None:
    """`search` has a pinned V100 machine and two P100 machines: a job of its that wants V100s borrows, or waits for ever."""
    example = Path(__file__).parents[2] / "examples/clusters/cells.yaml"
    (tmp_path / "jobs.csv").write_text(
        "submitted,duration,devices,vc,types\n0,100,8,search,p100\n0,50,8,search,v100\n"
    )
    code, out, err = gyrostat("simulate", "--cluster", example, "--no-borrowing", "jobs.csv", cwd=tmp_path)
    assert code == 0, err
    assert any("1 (+1 unfinished)" in line for line in out)
    code, out, err = gyrostat("simulate", "--cluster", example, "jobs.csv", cwd=tmp_path)
    assert code == 0, err
    assert any("makespan" in line and "100 s" in line for line in out)


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
