"""When the watchdog acts, and which workers it finds: on stacks as the fault handler writes them."""

from __future__ import annotations

from pathlib import Path

import pytest

import gyrostat
from gyrostat.core.errors import UsageError
from gyrostat.job.diagnostics.watchdog import COLLECT_S, Action, Standstill, Watchdog, WatchdogPolicy, hanging

PACKAGE = Path(gyrostat.__file__).parent
TORCH = "/usr/lib/python3/dist-packages/torch"
BELOW = [
    (f"{PACKAGE}/job/processes/worker.py", 201, "run_program"),
    (f"{PACKAGE}/job/processes/worker.py", 150, "_run"),
]
WAITS = [
    (f"{PACKAGE}/engine/transport/group.py", 160, "wait"),
    (f"{PACKAGE}/engine/training/runner.py", 300, "_settle"),
    ("/home/me/train.py", 30, "<module>"),
]
SLEEPS = [("/home/me/model.py", 12, "forward"), (f"{TORCH}/nn/modules/module.py", 7, "__call__")]
IN_TORCH = [(f"{TORCH}/functional.py", 3, "conv"), ("/home/me/train.py", 31, "<module>")]
BACKWARD = [
    (f"{TORCH}/autograd/graph.py", 8, "_engine_run_backward"),
    (f"{PACKAGE}/engine/training/runner.py", 240, "backward"),
    ("/home/me/train.py", 31, "<module>"),
]
DATA = [
    ("/usr/lib/python3.11/threading.py", 5, "wait"),
    (f"{PACKAGE}/data/wire.py", 99, "receive"),
    (f"{PACKAGE}/engine/training/runner.py", 220, "run_pass"),
]


def thread(frames: list[tuple[str, int, str]], name: str = "Thread") -> str:
    lines = [f'  File "{file}", line {line} in {function}' for file, line, function in frames]
    return "\n".join([f"{name} 0x00007f12 (most recent call first):", *lines])


def stack(frames: list[tuple[str, int, str]]) -> str:
    """A dump of two threads; which one took the signal is chance."""
    listener = [
        (f"{PACKAGE}/job/processes/agent_connection.py", 80, "messages"),
        ("/usr/lib/python3.11/threading.py", 1, "run"),
    ]
    return "\n\n".join([thread(listener, "Current thread"), thread([*frames, *BELOW])])


def test_which_worker_hangs() -> None:
    stacks = {0: stack(WAITS), 1: stack(SLEEPS), 2: stack(IN_TORCH), 3: stack(BACKWARD), 4: stack(DATA)}
    assert hanging(stacks) == {
        1: "/home/me/model.py:12 in forward",
        2: "/home/me/train.py:31 in <module>",
        3: f"{PACKAGE}/engine/training/runner.py:240 in backward (in step.backward)",
        4: f"{PACKAGE}/data/wire.py:99 in receive (waiting for data)",
    }


def test_a_stack_without_its_foot() -> None:
    """The fault handler leaves out what is deeper than a hundred frames."""
    deep = thread([("/home/me/tree.py", 4, "walk")] * 100, "Current thread")
    assert hanging({0: deep, 1: "nothing of use"}) == {0: "/home/me/tree.py:4 in walk"}


def test_it_barks_once_per_standstill() -> None:
    dog = Watchdog(WatchdogPolicy(seconds=10.0))
    assert dog.deadline() is None
    assert not dog.requests_stacks([0, 1], 100.0)
    dog.progress(100.0)
    assert dog.deadline() == 110.0
    dog.progress(105.0)
    assert not dog.requests_stacks([0, 1], 114.9)
    assert dog.requests_stacks([0, 1], 115.0)
    assert not dog.requests_stacks([0, 1], 116.0)
    dog.add_stack(1, stack(SLEEPS))
    assert dog.finding(116.0) is None
    assert dog.deadline() == 115.0 + COLLECT_S
    dog.add_stack(0, stack(WAITS))
    found = dog.finding(116.0)
    assert found == Standstill(
        seconds=10.0,
        stacks={0: stack(WAITS), 1: stack(SLEEPS)},
        hanging={1: "/home/me/model.py:12 in forward"},
        ends=False,
    )
    assert str(found) == ("no step was completed for 10 s: worker 1 hangs at /home/me/model.py:12 in forward")
    assert found.stack_lines()[0] == "stack of worker 0:"
    assert dog.deadline() is None
    dog.progress(130.0)
    assert dog.requests_stacks([0, 1], 140.0)


def test_a_worker_that_does_not_answer_is_not_waited_for() -> None:
    dog = Watchdog(WatchdogPolicy(seconds=1.0, action=Action.END))
    dog.progress(0.0)
    assert dog.requests_stacks([0, 1], 1.0)
    dog.add_stack(0, stack(SLEEPS))
    dog.add_stack(7, stack(SLEEPS))
    found = dog.finding(1.0 + COLLECT_S)
    assert found is not None
    assert (set(found.hanging), found.ends) == ({0}, True)
    assert dog.finding(9.0) is None


def test_if_all_wait_nobody_is_ended() -> None:
    dog = Watchdog(WatchdogPolicy(seconds=1.0, action=Action.END))
    dog.progress(0.0)
    dog.requests_stacks([0], 1.0)
    dog.add_stack(0, stack(WAITS))
    found = dog.finding(1.0)
    assert found is not None
    assert not found.ends
    assert str(found) == (
        "no step was completed for 1 s; no worker hangs in the script's code, so all wait inside gyrostat: see the stacks"
    )


def test_progress_while_stacks_are_collected() -> None:
    """The finding is reported, but no worker is killed."""
    dog = Watchdog(WatchdogPolicy(seconds=1.0, action=Action.END))
    dog.progress(0.0)
    dog.requests_stacks([0], 1.0)
    dog.progress(1.1)
    dog.add_stack(0, stack(SLEEPS))
    found = dog.finding(1.2)
    assert found is not None
    assert (set(found.hanging), found.ends) == ({0}, False)
    dog.pause()
    assert dog.deadline() is None


def test_no_time_is_no_policy() -> None:
    with pytest.raises(UsageError):
        WatchdogPolicy(seconds=0)
