"""Traces in all their forms, and what is wrong with them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from gyrostat.core.errors import UsageError
from gyrostat.core.request import Affinity
from gyrostat.sim.traces import between, read_trace, tenants
from tests.sim.data import data

OWN = """submitted,duration,devices,id,vc,min_devices,max_devices,types,mixes_types,priority,affinity,workload,work
20,5.5,4,late,x,2,8,v100|p100,yes,3,soft,ResNet-18,5.5
10,60,1,early,y,,,,,,,,
"""


def test_a_trace_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "own.csv"
    path.write_text(OWN)
    early, late = read_trace(path)
    assert (early.request.id, early.request.vc, early.request.submitted, early.duration) == (
        "early",
        "y",
        10.0,
        60.0,
    )
    assert not early.request.elastic
    job = late.request
    assert (job.smallest, job.devices, job.largest, job.types) == (2, 4, 8, ("v100", "p100"))
    assert (job.priority, job.affinity, job.workload) == (3, Affinity.SOFT, "ResNet-18")
    assert (job.mixes_types, job.work) == (True, 5.5)
    assert (early.request.mixes_types, early.request.work) == (False, None)


def test_parquet_says_the_same_as_csv(tmp_path: Path) -> None:
    pyarrow_csv = pytest.importorskip("pyarrow.csv")
    parquet = pytest.importorskip("pyarrow.parquet")
    (tmp_path / "own.csv").write_text(OWN)
    parquet.write_table(pyarrow_csv.read_csv(tmp_path / "own.csv"), tmp_path / "own.parquet")
    assert read_trace(tmp_path / "own.parquet") == read_trace(tmp_path / "own.csv")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "has no jobs in it"),
        ("a,b\n1,2\n", "its columns are a, b; a trace of your own needs submitted, duration and devices"),
        ("submitted,duration,devices\n1,2,zero\n", "job 1: invalid literal"),
        ("submitted,duration,devices\n1,0,1\n", "job 1: the duration of a job must be more than 0 seconds"),
        ("submitted,duration,devices\n1,1,0\n", "job 1: job job-0 asks for 0 devices"),
        ("submitted,duration,devices,affinity\n1,1,1,odd\n", "'odd' is not a valid Affinity"),
        ("submitted,duration,devices,mixes_types\n1,1,1,odd\n", "mixes_types is yes or no, got 'odd'"),
    ],
)
def test_bad_traces_are_refused(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(content)
    with pytest.raises(UsageError, match=message):
        read_trace(path)


def test_a_file_that_is_not_there() -> None:
    with pytest.raises(UsageError, match=r"nosuch\.csv cannot be read"):
        read_trace(Path("nosuch.csv"))


@pytest.mark.parametrize("name", ["philly.csv", "itp/cluster02.csv", "alibaba2023/pods.csv"])
def test_recorded_traces(name: str) -> None:
    found = read_trace(data(name))
    assert len(found) == {"philly.csv": 82_247}.get(name, len(found))
    assert len(found) > 1000
    assert max(job.request.devices for job in found) >= 8
    assert [job.request.submitted for job in found] == sorted(job.request.submitted for job in found)
    assert len({job.request.id for job in found}) == len(found)


def test_tenants_by_rule_do_not_depend_on_other_jobs() -> None:
    found = read_trace(data("itp/cluster02.csv"))
    divided = tenants(found, 4)
    assert tenants(found[100:], 4) == divided[100:]
    share = Counter(job.request.vc for job in divided)
    assert share["t0"] / len(found) == pytest.approx(0.5, abs=0.03)
    assert share["t1"] / len(found) == pytest.approx(0.25, abs=0.03)
    assert set(share) == {"t0", "t1", "t2", "t3"}


def test_days_count_from_the_first_job() -> None:
    found = read_trace(data("philly.csv"))
    chosen = list(between(found, 30, 31))
    first = found[0].request.submitted
    assert chosen
    assert all(30 <= (job.request.submitted - first) / 86_400 < 31 for job in chosen)
