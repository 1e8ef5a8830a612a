"""How long one planning of a job takes: 64 virtual workers on 64 devices of three types, CPU milliseconds.

Against its limit of 5 ms: the best split over all devices, the top proposals of a job that holds four of them (each
increment of each type is planned), and, beside them, the batch sizes of a job yet to be defined.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from figures import Figure, Options, Target, main
from gyrostat.core.profile import Profile, Speed
from gyrostat.sched.planner.companion import Companion
from gyrostat.sched.planner.definition import define
from gyrostat.sched.planner.split import best_split
from pairs import Pair

LIMIT_MS = 5.0
DEVICES = {"v100": 32, "p100": 16, "k80": 16}
SPEEDS = {
    "v100": 281.0,
    "p100": 168.0,
    "k80": 40.0,
}  # samples/s of Gavel's ResNet-50 with micro-batches of 64
PROFILE = Profile(
    "resnet50",
    {
        name: Speed(
            tuple((batch, rate * batch / (batch + 16)) for batch in (8, 16, 24, 32, 48, 64, 96, 128)),
            ((2, 0.02), (4, 0.05), (8, 0.1), (64, 0.2)),
        )
        for name, rate in SPEEDS.items()
    },
)


def split() -> None:
    assert best_split(PROFILE, batch=64, virtual_workers=64, devices=DEVICES) is not None


def proposals() -> None:
    job = Companion(profile=PROFILE, batch=64, virtual_workers=64)
    assert job.proposals({"v100": 4}, {**DEVICES, "v100": 28}, top=3)


def definition() -> None:
    assert define(PROFILE, global_batch=8192, devices=DEVICES) is not None


def measure(options: Options) -> list[Figure]:
    return [
        _figure(
            "the best split, 64 virtual workers, 3 types, 64 devices",
            split,
            options.pairs,
            Target(at_most=1.0),
        ),
        _figure("top proposals of a job on 4 of them", proposals, options.pairs, Target(at_most=1.0)),
        _figure("batch sizes for a global batch of 8192 on them", definition, options.pairs, None),
    ]


def _figure(name: str, call: Callable[[], None], pairs: int, target: Target | None) -> Figure:
    measured = [Pair(_milliseconds(call), LIMIT_MS) for _ in range(pairs)]
    return Figure(name=name, ours="planning", theirs="limit", unit="ms", pairs=measured, target=target)


def _milliseconds(call: Callable[[], None]) -> float:
    began = time.process_time()
    call()
    return 1000 * (time.process_time() - began)


if __name__ == "__main__":
    main(__doc__ or "", measure)
