"""`gyrostat plan` as its users start it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gyrostat.cli.main import build_app
from gyrostat.core.errors import UsageError
from tests.cli.gyrostat_process import gyrostat

PROFILES = {
    "v100": {"resnet50": {"128": 800.0, "256": 800.0}, "bert": {"8": 90.0}},
    "p100": {"resnet50": {"128": 200.0, "256": 200.0}},
}


@pytest.fixture
def profiles(tmp_path: Path) -> str:
    path = tmp_path / "profiles.json"
    path.write_text(json.dumps(PROFILES))
    return str(path)


def plan(*options: str) -> str:
    result = CliRunner().invoke(build_app(), ["plan", *options], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_it_splits_virtual_workers_and_says_what_mixing_brings(profiles: str) -> None:
    output = plan(
        "--profile",
        profiles,
        "--workload",
        "resnet50",
        "--devices",
        "v100:2,p100:8",
        "--virtual-workers",
        "32",
    )
    assert "v100  2 of 2   8 " in output
    assert "p100  8 of 8   2 " in output
    assert "step 2560.0 ms" in output
    assert "mixing is 100.0 % faster than v100 alone" in output


def test_it_defines_a_job(profiles: str) -> None:
    options = ("--workload", "resnet50", "--devices", "v100:2,p100:8", "--global-batch", "8192", "--json")
    (answer,) = json.loads(plan("--profile", profiles, *options))
    assert sum(answer["batch_sizes"]) == 8192
    assert {part["type"]: part["devices"] for part in answer["parts"]} == {"v100": 2, "p100": 8}
    assert answer["step_seconds"] == pytest.approx(2.56)
    assert answer["alone_step_seconds"] == {"v100": pytest.approx(5.12), "p100": pytest.approx(5.12)}


def test_it_falls_back_to_one_type(profiles: str) -> None:
    output = plan(
        "--profile",
        profiles,
        "--workload",
        "resnet50",
        "--devices",
        "v100:2,p100:1",
        "--virtual-workers",
        "4",
    )
    assert "mixing does not pay: v100 alone" in output


def test_all_workloads_of_a_file(profiles: str) -> None:
    output = plan("--profile", profiles, "--devices", "v100:1,p100:1", "--virtual-workers", "2")
    assert "resnet50, 2 virtual workers of 256 samples" in output
    assert "bert was not measured on p100" in output


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (("--devices", "v100:1"), "give either --virtual-workers N"),
        (("--devices", "v100:1", "--virtual-workers", "2", "--global-batch", "8"), "give either"),
        (("--devices", "v100:1", "--global-batch", "8", "--batch-size", "8"), "leave out --batch-size"),
        (("--devices", "v100", "--virtual-workers", "2"), "such as v100:2,p100:8; got 'v100'"),
        (("--devices", "v100:1,v100:2", "--virtual-workers", "2"), "each type once"),
        (("--devices", "t4:1", "--virtual-workers", "2"), "nothing in the profile was measured on t4"),
        (("--devices", "v100:1", "--virtual-workers", "2", "--workload", "gpt"), "it has resnet50, bert"),
        (
            ("--devices", "p100:1", "--virtual-workers", "2", "--workload", "bert"),
            "was not measured on 'p100'",
        ),
        (("--devices", "v100:1", "--virtual-workers", "2", "--batch-size", "999"), "fit on none of 1 v100"),
        (("--devices", "v100:1", "--global-batch", "100", "--workload", "resnet50"), "cannot be split over"),
    ],
)
def test_impossible_options_are_refused(profiles: str, options: tuple[str, ...], complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        plan("--profile", profiles, *options)


def test_bad_files_exit_with_2_and_one_line(tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text("{")
    code, _, err = gyrostat(
        "plan", "--profile", "bad.json", "--devices", "a:1", "--virtual-workers", "1", cwd=tmp_path
    )
    assert code == 2
    assert err[0].startswith("gyrostat: error: bad.json is not JSON")
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        plan("--profile", str(tmp_path / "none.json"), "--devices", "a:1", "--virtual-workers", "1")
