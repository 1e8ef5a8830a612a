"""Inside a worker under test: at a place in the engine it sends itself a signal, once. `injector` decides where and when.

The product has no hooks for this: functions of the engine are wrapped, in the worker's process alone.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from gyrostat.engine.checkpoint import CheckpointStore
from gyrostat.engine.reconfigure.recovery import Recovery
from gyrostat.engine.reconfigure.transition import Transition
from gyrostat.engine.script import session
from gyrostat.engine.script.training_loop import TrainingLoop
from gyrostat.engine.training.evaluation import Evaluator
from gyrostat.engine.training.mini_batch import MiniBatchRunner

ORDERS = "GYROSTAT_TEST_FAULTS"
_member: list[int] = []


def arm() -> None:
    """Called by the script under test before anything else."""
    assert session._Process.assignment is not None
    _member.append(session._Process.assignment.member)
    _wrap(MiniBatchRunner, "_begin_micro_batch", before="micro_batch", rank=lambda runner, micro: micro.rank)
    _in_backward()
    _wrap(MiniBatchRunner, "_send_off", before="exchange")
    _wrap(MiniBatchRunner, "_complete", before="reduce", after="reduced")
    register_optimizer_step_pre_hook(lambda optimizer, args, kwargs: reached("update"))
    register_optimizer_step_post_hook(lambda optimizer, args, kwargs: reached("updated"))
    _wrap(TrainingLoop, "boundary", before="boundary")
    _wrap(Transition, "_switch", before="fence", after="fenced")
    _in_evaluation()
    _wrap(CheckpointStore, "_write_files", before="checkpoint")
    _wrap(TrainingLoop, "finish", before="end")
    _wrap(Recovery, "_agree", before="recovery")


def reached(place: str, rank: int | None = None) -> None:
    """If somebody wants this worker to fail here and now, it does."""
    job = session.current()
    step = job.step if job is not None else 0
    for order in json.loads(os.environ[ORDERS]):
        when = step if order["step"] is None or place == "end" else order["step"]
        wanted = (order["where"], order["member"], when)
        if wanted != (place, _member[0], step):
            continue
        if order["rank"] is None or order["rank"] == rank:
            _obey(order)


def _obey(order: dict[str, Any]) -> None:
    try:
        os.close(os.open(order["mark"], os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return
    if order["signal"] == signal.SIGSTOP:
        print(f"stops {os.getpid()} {order['seconds']}", flush=True)
    os.kill(os.getpid(), order["signal"])


def _wrap(
    owner: type,
    name: str,
    *,
    before: str | None = None,
    after: str | None = None,
    rank: Callable[..., int] | None = None,
) -> None:
    original = getattr(owner, name)

    def wrapped(*args: Any, **options: Any) -> Any:
        if before is not None:
            reached(before, None if rank is None else rank(*args))
        result = original(*args, **options)
        if after is not None:
            reached(after)
        return result

    setattr(owner, name, wrapped)


def _in_backward() -> None:
    original = MiniBatchRunner.backward

    def backward(runner: MiniBatchRunner, loss: Any, **options: Any) -> None:
        rank = runner.current("step.backward").rank
        if loss.requires_grad:
            loss.register_hook(lambda gradient: reached("backward", rank))
        original(runner, loss, **options)

    setattr(MiniBatchRunner, "backward", backward)  # noqa: B010


def _in_evaluation() -> None:
    original = Evaluator.run

    def run(evaluator: Evaluator, loader: Any, fn: Callable[[Any], Any], *args: Any) -> list[Any]:
        def doomed(batch: Any) -> Any:
            reached("evaluate")
            return fn(batch)

        return original(evaluator, loader, doomed, *args)

    setattr(Evaluator, "run", run)  # noqa: B010
