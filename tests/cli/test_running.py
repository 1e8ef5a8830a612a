"""`gyrostat scale` and `profile`: what they ask a running job for, and what they print."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from gyrostat.cli.main import build_app
from gyrostat.core.errors import UsageError
from gyrostat.job.control.client import RequestFailed
from gyrostat.job.control.profiling import SizeMeasured
from gyrostat.job.control.requests import RequestResult

ROWS = (
    SizeMeasured(workers=1, steps=20, step_seconds=0.5, throughput=64.0, busy=0.9, efficiency=1.0),
    SizeMeasured(workers=2, steps=20, step_seconds=0.4, throughput=80.0, busy=0.75, efficiency=0.625),
)


class FakeCaller:
    """Notes what it is asked for."""

    asked: list[tuple[Any, ...]]
    answer = RequestResult(True, "4 workers since step 7", 7, 4, 12.3, 456.0)

    def __init__(self, name: str) -> None:
        self.asked.append((name,))

    def __enter__(self) -> FakeCaller:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def __getattr__(self, verb: str) -> Any:
        def ask(*args: Any) -> Any:
            self.asked.append((verb, *args))
            return ROWS if verb == "profile" else self.answer

        return ask


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    FakeCaller.asked = []
    monkeypatch.setattr("gyrostat.job.control.client.JobClient", FakeCaller)
    return FakeCaller.asked


def invoke(*args: str) -> Result:
    return CliRunner().invoke(build_app(), args, catch_exceptions=False)


@pytest.mark.parametrize(
    ("args", "request_"),
    [
        (("4",), ("scale", 4)),
        (("+2",), ("scale_out", 2)),
        (("-1",), ("scale_in", 1, ())),
        (("-2", "--without", "1,3"), ("scale_in", 2, (1, 3))),
    ],
)
def test_scale(asked: list[tuple[Any, ...]], args: tuple[str, ...], request_: tuple[Any, ...]) -> None:
    result = invoke("scale", "train", *args)
    assert asked == [("train",), request_]
    assert result.output == "4 workers since step 7 (pause 12 ms, prepared in 456 ms)\n"


@pytest.mark.parametrize("args", [("many",), ("+",), ("-1", "--without", "1,3"), ("-1", "--without", "x")])
def test_scale_wants_a_number(asked: list[tuple[Any, ...]], args: tuple[str, ...]) -> None:
    with pytest.raises(UsageError, match=r"got"):
        invoke("scale", "train", *args)
    assert asked == []


def test_what_is_not_done_is_an_error(asked: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeCaller, "answer", RequestResult(False, "busy with a profile; retry"))
    with pytest.raises(RequestFailed, match="busy"):
        invoke("scale", "train", "4")
    monkeypatch.setattr(FakeCaller, "answer", RequestResult(False, "no such worker: [9]", invalid=True))
    with pytest.raises(UsageError, match="no such worker"):
        invoke("migrate", "train", "9")


def test_profile_prints_a_table(asked: list[tuple[Any, ...]]) -> None:
    lines = invoke("profile", "train", "--min", "1", "--max", "2", "--steps", "5").output.splitlines()
    assert asked[-1] == ("profile", 1, 2, 5)
    assert lines[0].split() == ["workers", "samples/s", "efficiency", "step", "busy"]
    assert lines[1].split() == ["1", "64.0", "100%", "500.0", "ms", "90%"]
    assert lines[2].split() == ["2", "80.0", "62%", "400.0", "ms", "75%"]


def test_profile_prints_json(asked: list[tuple[Any, ...]]) -> None:
    rows = json.loads(invoke("profile", "train", "--json").output)
    assert asked[-1] == ("profile", None, None, 20)
    assert [(row["workers"], row["throughput"], row["efficiency"]) for row in rows] == [
        (1, 64.0, 1.0),
        (2, 80.0, 0.625),
    ]
