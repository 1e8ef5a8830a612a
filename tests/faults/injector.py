"""Faults in real workers, said in one line.

    outcome = fail_at(step=7, where="reduce", worker=1).run(launch, SCRIPT, virtual_workers=4, workers=2)

Faults can be chained (`.and_at(…)`). Each strikes once, however often the job comes by its place again. A worker that is
stopped (SIGSTOP) goes on after some seconds. Places, in the order in which a step passes them:

    micro_batch   before the script gets a micro-batch        backward   inside it
    exchange      the envelope is on its way to the others    reduce     inside the reduction; this worker has not completed it
    reduced       this worker has, maybe others not           update     between reduction and update
    updated       after it                                    boundary   before the next step is handed out
    fence         a generation is about to begin              fenced     it has, on this worker
    evaluate      in job.evaluate                             checkpoint while one is written
    end           the script has ended                        recovery   those who are left are about to agree
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import textwrap
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gyrostat.job.control.observer import NullObserver
from gyrostat.job.control.outcome import Outcome
from gyrostat.job.processes.output import OutputStream
from tests.conftest import Launch
from tests.faults.doom import ORDERS

_HERE = Path(__file__).parents[2]
_ARM = f"import sys; sys.path.append({str(_HERE)!r}); from tests.faults import doom; doom.arm()\n"


@dataclass(frozen=True, kw_only=True)
class Fault:
    step: int | None
    """So many steps are complete; None: whenever it comes there first."""
    where: str
    worker: int
    signal: int = signal.SIGKILL
    seconds: float = 0.0
    """For which a worker that is stopped does nothing."""
    rank: int | None = None
    """The virtual worker whose micro-batch it is; None: the first that comes."""


def fail_at(
    *,
    step: int | None,
    where: str,
    worker: int,
    signal: int = signal.SIGKILL,
    seconds: float = 0.0,
    rank: int | None = None,
) -> Faults:
    """The worker is sent a signal (by itself, in the middle of what it does)."""
    return Faults().and_at(step=step, where=where, worker=worker, signal=signal, seconds=seconds, rank=rank)


@dataclass(frozen=True)
class Faults:
    faults: tuple[Fault, ...] = ()

    def and_at(self, **fault: Any) -> Faults:
        return replace(self, faults=(*self.faults, Fault(**fault)))

    def run(self, launch: Launch, script: str, **options: Any) -> Outcome:
        """Run the script with these faults. Raises if one of them did not strike."""
        path = launch.script(_ARM + textwrap.dedent(script))
        marks = [path.with_suffix(f".fault{number}") for number in range(len(self.faults))]
        orders = [
            {
                "step": fault.step,
                "where": fault.where,
                "member": fault.worker,
                "signal": int(fault.signal),
                "seconds": fault.seconds,
                "rank": fault.rank,
                "mark": str(mark),
            }
            for fault, mark in zip(self.faults, marks, strict=True)
        ]
        env = {**options.pop("env", {}), ORDERS: json.dumps(orders)}
        with _Wakes() as observer:
            outcome = launch(path, env=env, observer=observer, **options)
        missed = [fault for fault, mark in zip(self.faults, marks, strict=True) if not mark.exists()]
        assert not missed, f"these faults did not strike: {missed}"
        return outcome


class _Wakes(NullObserver):
    """Has workers that stopped themselves go on."""

    def __init__(self) -> None:
        self._timers: list[threading.Timer] = []

    def __enter__(self) -> _Wakes:
        return self

    def __exit__(self, *error: object) -> None:
        for timer in self._timers:
            timer.cancel()
            timer.join()

    def printed(self, worker: int, stream: OutputStream, line: str) -> None:
        if line.startswith("stops "):
            _, pid, seconds = line.split()
            timer = threading.Timer(float(seconds), _wake, [int(pid)])
            self._timers.append(timer)
            timer.start()


def _wake(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)
