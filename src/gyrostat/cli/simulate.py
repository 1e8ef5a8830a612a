"""`gyrostat simulate`: the scheduler in virtual time, on a trace."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from gyrostat.cli import log_options
from gyrostat.cli import simulate_options as options
from gyrostat.core import logs
from gyrostat.core.errors import UsageError
from gyrostat.core.files import check_writable, make_directory, read_text

if TYPE_CHECKING:
    from gyrostat.core.devices import Fleet
    from gyrostat.sched.port import Change
    from gyrostat.sim.job import TraceJob
    from gyrostat.sim.report import ReportedRun
    from gyrostat.sim.setup import Setup
    from gyrostat.sim.simulate import SimulationResult

_HELP = "\n\n".join(
    [
        "Run the scheduler on a trace in virtual time, and compare policies.",
        "  gyrostat simulate --cluster v100:73x8 --policy fifo --policy tiresias philly.csv",
        "  gyrostat simulate --cluster by-load:73 --sharing quota --sharing cells --policy fifo philly.csv",
        "  gyrostat simulate --cluster cells.yaml --policy 'fifo;prod=tiresias' --report out jobs.csv",
        "TRACE is the trace of Philly, ITP or Alibaba, or your own: CSV or Parquet with submitted, duration, devices and more "
        "(docs/howto/simulate.md). CLUSTER is a cell file, nodes such as v100:73x8,p100:2x4 (one pool), or by-load:NODES: "
        "machines with 8 devices, divided among the tenants of the trace by load.",
        "The same trace, options and seed give the same result, bit for bit. --record saves every observation and decision of "
        "the scheduler; --replay replays and compares them. Exit code: 1 if a plan differs.",
    ]
)

_MEASURING = 30.0
"""Seconds until a job has measured its throughput on new devices."""


def register(app: typer.Typer) -> None:
    app.command("simulate", help=_HELP)(simulate)


def simulate(
    trace: options.Trace = None,
    cluster: options.Cluster = None,
    policy: options.Policy = None,
    sharing: options.Sharing = None,
    borrowing: options.Borrowing = True,
    private: options.Private = True,
    tenants: options.Tenants = 0,
    days: options.Days = None,
    profiles: options.Profiles = None,
    truth: options.Truth = None,
    measure_after: options.MeasureAfter = None,
    overhead: options.Overhead = 0.0,
    start_time: options.StartTime = 0.0,
    rescale_pause: options.RescalePause = 0.0,
    spread_penalty: options.SpreadPenalty = 0.0,
    packed_speed: options.PackedSpeed = 0.5,
    serving: options.Serving = None,
    failures: options.Failures = None,
    checkpoint_every: options.CheckpointEvery = 0.0,
    seed: options.Seed = 0,
    report: options.Report = None,
    record: options.Record = None,
    replay: options.Replay = None,
    verbose: log_options.Verbose = 0,
    log_format: log_options.Format = None,
) -> None:
    logs.configure(verbose, log_format)
    if replay is not None:
        from gyrostat.cli.replay import decide_again, print_replayed

        if trace is not None:
            raise UsageError(f"--replay reads everything from {replay}; omit {trace}")
        print_replayed(decide_again(replay))
        return
    if trace is None or cluster is None:
        raise UsageError("simulate needs --cluster CLUSTER and a TRACE (or --replay FILE)")
    if record is not None:
        check_writable(record, "--record")

    from rich.console import Console

    from gyrostat.cli.simulations import print_runs, run_setup
    from gyrostat.sim.cluster import Costs
    from gyrostat.sim.report import ReportedRun, write_report
    from gyrostat.sim.setup import Setup, read_cluster, throughput_of
    from gyrostat.sim.summary import summarise

    console = Console(soft_wrap=True, highlight=False)
    jobs = _jobs(trace, tenants, days)
    text, nodes = read_cluster(cluster, jobs)
    costs = Costs(
        start=start_time,
        rescale=rescale_pause,
        spread=spread_penalty,
        sharing=packed_speed,
        checkpoint_every=checkpoint_every,
        measure=_measuring(truth, measure_after),
    )
    real = None if truth is None else throughput_of(read_text(truth), overhead)
    base = Setup(
        cluster=text,
        nodes=nodes,
        sharing="cells",
        policy="fifo",
        lends=borrowing,
        overhead=overhead,
        profiles=None if profiles is None else read_text(profiles),
    )
    setups = _setups(base, policy or ["fifo"], sharing or ["cells"])
    if record is not None and len(setups) != 1:
        raise UsageError(f"--record needs one run, but --policy and --sharing request {len(setups)}")
    if report is not None:
        make_directory(report, "--report")
    alone: dict[str, SimulationResult] = {}
    runs: list[ReportedRun] = []
    for setup in setups:
        changes = _changes(setup.parts()[0], serving, failures, seed, jobs)
        compare = private and not setup.one_vc and setup.sharing != "private"
        if compare and setup.policy not in alone:
            apart = _replace(setup, sharing="private")
            broken = _changes(apart.parts()[0], None, failures, seed, jobs)
            alone[setup.policy] = run_setup(apart, jobs, real, costs, broken, f"{setup.policy}, private")
        name = f"{setup.policy}, {setup.sharing}"
        result = run_setup(setup, jobs, real, costs, changes, name, record)
        summary = summarise(
            result,
            policy=setup.policy,
            sharing="one pool" if setup.one_vc else setup.sharing,
            private=alone.get(setup.policy) if compare else None,
        )
        runs.append(ReportedRun(summary, result))
    print_runs(console, runs)
    if report is not None:
        page = write_report(
            report, f"{trace.name} on {cluster}", runs, "gyrostat " + shlex.join(sys.argv[1:])
        )
        console.print(f"written to {page}")


def _measuring(truth: Path | None, after: float | None) -> float:
    if truth is None and after is not None:
        raise UsageError(f"--measure-after {after:g} needs --truth FILE")
    return 0.0 if truth is None else _MEASURING if after is None else after


def _jobs(trace: Path, tenants: int, days: str | None) -> list[TraceJob]:
    from gyrostat.sim.traces import between, read_trace
    from gyrostat.sim.traces import tenants as divided

    jobs = read_trace(trace)
    if tenants:
        jobs = divided(jobs, tenants)
    if days is not None:
        first, dash, last = days.partition("-")
        if not dash or not first.isdigit() or not last.isdigit() or int(first) >= int(last):
            raise UsageError(f"--days is FROM-TO, such as 10-20; got {days!r}")
        jobs = list(between(jobs, int(first), int(last)))
    if not jobs:
        raise UsageError(f"{trace} has no jobs" + (f" on days {days}" if days else ""))
    return jobs


def _setups(base: Setup, policies: list[str], sharings: list[str]) -> list[Setup]:
    from gyrostat.sim.sharing import Sharing

    for sharing in sharings:
        if sharing not in list(Sharing):
            raise UsageError(f"--sharing is {', '.join(Sharing)}; got {sharing!r}")
    if base.spec() is None:
        return [_replace(base, policy=policy, sharing="flat") for policy in policies]
    return [_replace(base, policy=policy, sharing=sharing) for policy in policies for sharing in sharings]


def _replace(setup: Setup, **changes: str) -> Setup:
    from gyrostat.sim.setup import read_setup

    return read_setup({**setup.to_json(), **changes})


def _changes(
    fleet: Fleet, serving: str | None, failures: str | None, seed: int, jobs: list[TraceJob]
) -> Callable[[], list[Iterator[tuple[float, Change]]]]:
    from gyrostat.sim.failures import failures as failing
    from gyrostat.sim.serving import Diurnal

    began = jobs[0].request.submitted
    streams: list[Callable[[], Iterator[tuple[float, Change]]]] = []
    if serving is not None:
        type_, _, span = serving.partition(":")
        low, dash, high = span.partition("-")
        if type_ not in fleet.totals or not dash or not low.isdigit() or not high.isdigit():
            raise UsageError(
                f"--serving is TYPE:LOW-HIGH, such as {next(iter(fleet.totals))}:10-100; got {serving!r}"
            )
        load = Diurnal(type=type_, trough=int(low), peak=int(high), seed=seed, noise=0.05)
        streams.append(load.changes)
    if failures is not None:
        try:
            between, repair = (3600 * float(hours) for hours in failures.split(":"))
        except ValueError:
            raise UsageError(f"--failures is HOURS:HOURS, such as 2000:4; got {failures!r}") from None
        streams.append(lambda: failing(fleet, between=between, repair=repair, seed=seed, began=began))
    return lambda: [stream() for stream in streams]
