"""The benchmarks' own arithmetic on made-up numbers, and that every benchmark can be called. Nothing here is timed."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
COMMANDS = (
    "accumulation",
    "cell_allocation",
    "checkpoint_stall",
    "context_switch",
    "ddp_accumulation",
    "ddp_throughput",
    "determinism_cost",
    "elastic_tick",
    "first_batch",
    "leader_failover",
    "loader_throughput",
    "memory",
    "newcomer_hidden",
    "order_1e9",
    "event_cost",
    "profile_job",
    "recoverable_cost",
    "recovery",
    "scale_in_gap",
    "scale_out_fence",
    "scale_out_gap",
    "shard_handout",
    "straggler",
    "server_straggler",
    "server_auc",
    "philly_elastic",
    "silent_peer",
    "simulate_philly",
    "tick",
    "transient",
    "verb_start",
    "planner",
    "wire_bytes",
    "worker_start",
)


@pytest.fixture
def pairs(monkeypatch: pytest.MonkeyPatch) -> Any:
    """benchmarks/pairs.py: scripts import each other by their bare names."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("pairs")


@pytest.fixture
def figures(pairs: Any) -> Any:
    return importlib.import_module("figures")


def test_twenty_values_leave_out_five_at_each_end(pairs: Any) -> None:
    values = [float(value) for value in range(20, 0, -1)]
    # P(5 or fewer of 20 fair coins show heads) is 21700 / 2**20.
    assert pairs.estimate(values) == pairs.Estimate(10.5, 6.0, 15.0, 1 - 2 * 21700 / 2**20)


def test_six_values_are_the_fewest_for_an_interval_of_95_percent(pairs: Any) -> None:
    assert pairs.estimate([3, 1, 2, 6, 5, 4]) == pairs.Estimate(3.5, 1, 6, 1 - 2 / 2**6)
    assert pairs.estimate([3, 1, 2, 5, 4]) == pairs.Estimate(3, 1, 5, 1 - 2 / 2**5)
    assert pairs.estimate([7]) == pairs.Estimate(7, 7, 7, 0)


def test_one_wild_value_moves_neither_median_nor_interval(pairs: Any) -> None:
    calm = [0.98, 0.99, 1.0, 1.01, 1.02] * 4
    wild = [*calm[:-1], 1000.0]
    assert (
        pairs.estimate(wild) == pairs.estimate(calm) == pairs.Estimate(1.0, 0.99, 1.01, 1 - 2 * 21700 / 2**20)
    )


def test_no_values_are_an_error(pairs: Any) -> None:
    with pytest.raises(ValueError, match="no values"):
        pairs.estimate([])


def test_the_sides_of_a_pair_alternate(pairs: Any) -> None:
    calls: list[str] = []

    def side(name: str, value: float) -> Any:
        def measure() -> float:
            calls.append(name)
            return value * len(calls)

        return measure

    measured = pairs.measure_pairs(side("ours", 1.0), side("theirs", 10.0), 3)
    assert calls == ["ours", "theirs", "theirs", "ours", "ours", "theirs"]
    assert measured == [pairs.Pair(1.0, 20.0), pairs.Pair(4.0, 30.0), pairs.Pair(5.0, 60.0)]
    assert [pair.ratio for pair in measured] == [1 / 20, 4 / 30, 5 / 60]


def test_a_figure_tells_its_medians_its_ratio_and_whether_the_target_is_reached(
    pairs: Any, figures: Any
) -> None:
    def figure(target: Any) -> Any:
        measured = [pairs.Pair(96.0 + i, 100.0) for i in range(3)]
        return figures.Figure(
            name="speed", ours="we", theirs="they", unit="/s", pairs=measured, target=target
        )

    assert figure(figures.Target(at_least=0.95)).lines() == [
        "speed",
        "  medians   we 97 /s, they 100 /s",
        "  ratio     0.970   75% interval 0.960 to 0.980, 3 pairs",
        "  target    at least 0.950: reached",
    ]
    missed = figure(figures.Target(at_least=0.97, low_at_least=0.965))
    assert missed.lines()[-1] == "  target    at least 0.970, interval from at least 0.965: NOT REACHED"
    assert missed.to_json()["reached"] is False
    assert figure(None).to_json()["target"] is None
    assert figure(figures.Target(at_most=0.9)).to_json()["reached"] is False


def test_the_table_of_a_chaos_campaign(pairs: Any) -> None:
    campaign = importlib.import_module("chaos_campaign")
    failed = {"kind": "hang", "text": "no step and no end for 60 s"}
    rounds = [
        {"recovered_from_peers": 3, "restored_from_checkpoint": 1, "begun_again": 0, "failures": []},
        {"recovered_from_peers": 2, "restored_from_checkpoint": 0, "begun_again": 1, "failures": [failed]},
    ]
    faults = [{"kind": "kill etcd", "until_next_step": seconds} for seconds in (0.5, 1.5, 2.5, None)]
    lines = campaign.table([{"target": "3 agents, etcd", "rounds": rounds, "faults": faults}])
    assert "| one machine | 0 | 0 | 0 | 0 | 0 | 0 | 0 | 0 | 0 |" in lines
    assert "| 3 agents, etcd | 2 | 4 | 0 | 1 | 0 | 0 | 5 | 1 | 1 |" in lines
    assert "| all | 2 | 4 | 0 | 1 | 0 | 0 | 5 | 1 | 1 |" in lines
    assert lines[-1] == "| kill etcd | 4 | 1.50 s | 2.5 s |"


_FORKS = """
import os, runpy, sys
import torch, gyrostat.cli.main

benchmarks, output, *names = sys.argv[1:]
sys.path[0] = benchmarks
for name in names:
    if os.fork() == 0:
        os.dup2(os.open(f"{output}/{name}", os.O_WRONLY | os.O_CREAT), 1)
        sys.argv = [f"{benchmarks}/{name}.py", "--help"]
        runpy.run_path(sys.argv[0], run_name="__main__")
        sys.exit("it did not end with its help")
    assert os.wait()[1] == 0, name
"""


def test_every_benchmark_explains_itself(tmp_path: Path) -> None:
    """In processes of their own, forked from one that has imported what takes long."""
    subprocess.run([sys.executable, "-c", _FORKS, str(BENCHMARKS), str(tmp_path), *COMMANDS], check=True)
    for name in COMMANDS:
        output = (tmp_path / name).read_text()
        assert all(option in output for option in ("--pairs", "--quick", "--json")), output
