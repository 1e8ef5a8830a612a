"""A user's own policy, as the documentation shows it: found by entry point, run, and checked."""

from __future__ import annotations

import re
import sys
import types
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from gyrostat.core.errors import UsageError
from gyrostat.sched.policies import find_policy, known_policies, registry
from tests.sched.little_cluster import LittleCluster, request

ROOT = Path(__file__).parents[3]


@pytest.fixture
def documented(monkeypatch: pytest.MonkeyPatch) -> None:
    """The example of docs/reference/policies.md, installed as `my_package.shortest`."""
    text = (ROOT / "docs/reference/policies.md").read_text()
    (source,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    module = types.ModuleType("my_package_shortest")
    exec(source, module.__dict__)
    monkeypatch.setitem(sys.modules, "my_package_shortest", module)
    points = [
        EntryPoint("shortest", "my_package_shortest:Shortest", registry.GROUP),
        EntryPoint("broken", "my_package_shortest:Nothing", registry.GROUP),
        EntryPoint("other", "builtins:dict", registry.GROUP),
    ]
    monkeypatch.setattr(registry, "entry_points", lambda group: points if group == registry.GROUP else [])


@pytest.mark.usefixtures("documented")
def test_the_documented_policy_is_found_and_decides() -> None:
    assert known_policies()["shortest"] == "my_package_shortest:Shortest"
    cluster = LittleCluster("gpu:1x2", "shortest:patience=50")
    cluster.submit(0.0, request("first", 2, work=100.0))
    cluster.submit(1.0, request("long", 2, at=1.0, work=1000.0), request("short", 2, at=1.0, work=10.0))
    actions = cluster.finish(2.0, "first")
    assert [(action.job, action.reason) for action in actions] == [("short", "shortest of 2 that wait")]
    cluster.submit(3.0, request("shorter", 2, at=3.0, work=1.0))
    assert cluster.tick(51.0).actions == ()  # patience is over: the long one is next
    assert [action.job for action in cluster.finish(52.0, "short")] == ["long"]


@pytest.mark.usefixtures("documented")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("broken", "policy 'broken' cannot be loaded from my_package_shortest:Nothing"),
        ("other", "policy 'other' is builtins:dict, which is not a gyrostat.sched.policy.Policy"),
        ("shortest:patience=long", "policy 'shortest': patience cannot be 'long'"),
    ],
)
def test_what_is_no_policy_is_refused(name: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        find_policy(name)
