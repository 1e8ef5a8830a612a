"""The training loop behind `Job`: joins the script's loops to the runner.

A script loops over epochs, steps and micro-batches. Everything that must happen at a boundary happens in `boundary`: reporting
the step, comparing replicas, checkpoints, stopping, changing the generation. A resumed script runs from the top, skips what
lies behind it (`loops.py`), and loads the saved state where it was taken.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from gyrostat.core.errors import Misuse
from gyrostat.core.job import ReductionChoice, TrainingOptions
from gyrostat.core.progress import Progress
from gyrostat.data.loader import OrderedLoader
from gyrostat.data.shard_loader import ShardLoader
from gyrostat.engine.checkpoint.manager import Boundary, NoCheckpoints
from gyrostat.engine.reconfigure.transition import NoTransition
from gyrostat.engine.reduce.buckets import DdpOptions
from gyrostat.engine.script.between_steps import BetweenSteps
from gyrostat.engine.script.checks import check_no_process_group, check_update
from gyrostat.engine.script.exits import Place, places_of, script_place
from gyrostat.engine.script.loaders import Loaders
from gyrostat.engine.script.loops import Loops
from gyrostat.engine.script.step import LoopData, Step, StepLoop
from gyrostat.engine.script.step_reporter import StepReporter
from gyrostat.engine.script.tracked import Tracked
from gyrostat.engine.state.digest import digest_of, tensor_digests
from gyrostat.engine.supervisor import Supervisor
from gyrostat.engine.training.evaluation import Evaluator
from gyrostat.engine.training.generation import CurrentGeneration
from gyrostat.engine.training.mean import Mean, MeanKind
from gyrostat.engine.training.reports import Requests

_COMPARE_EVERY = 100


class JobStopRequested(SystemExit):
    """The job was asked to stop: it has checkpointed at a boundary and ends here, in every worker."""


@dataclass(frozen=True, kw_only=True)
class TrainingParts:
    """What the training loop joins together."""

    options: TrainingOptions
    reduction: ReductionChoice
    seed: int
    generation: CurrentGeneration
    data: LoopData
    reduced: Callable[[], frozenset[int] | None]
    """The identities of all parameters whose gradients are reduced; None: DDP checks that itself."""
    evaluator: Evaluator
    loops: Loops
    loaders: Loaders
    tracked: Tracked
    reports: StepReporter
    checkpoints: NoCheckpoints
    transition: NoTransition
    compare_replicas: Callable[[Progress], None]
    supervisor: Supervisor


class TrainingLoop:
    """The loops of one worker's script."""

    def __init__(self, parts: TrainingParts) -> None:
        self._parts = parts
        self.current_step: Step | None = None
        self._open: Generator[Step, None, None] | None = None  # the `job.steps` loop that is running
        self._pulled: ShardLoader | None = None  # its loader, if it has shards
        self._broken: Step | None = None  # left in the middle of its inner loop
        self._left_at: list[Place] = []  # where the script left loops that were not used up
        self._evaluated: dict[tuple[int, ...], list[Any]] = {}  # results between loops, by place
        self._evaluations = 0  # since the last boundary
        self._requests = Requests()
        self._started = False
        self._just_joined = False
        self._hook = register_optimizer_step_pre_hook(self._before_update)

    @property
    def progress(self) -> Progress:
        return self._parts.loops.progress

    @property
    def step(self) -> int:
        """`job.step`."""
        return self.progress.step

    @property
    def is_main(self) -> bool:
        """`job.is_main`."""
        return self._parts.generation.is_main

    @property
    def tracked(self) -> Tracked:
        """What the script has handed over, and `job.state`."""
        return self._parts.tracked

    @property
    def epoch(self) -> int:
        """The epoch that is running; 0 outside `job.epochs`."""
        return max(self.progress.epoch, 0)

    @property
    def between_steps(self) -> BetweenSteps:
        """`job.between_steps`."""
        return BetweenSteps(self, self._parts.data.runner.parts.contexts, self._parts.tracked.modules)

    # Setting up.

    def shards(
        self, dataset: Any, batch_size: Any, name: str, others: dict[str, Any], **options: Any
    ) -> OrderedLoader:
        """`job.shards`: its queues are tracked under `name`."""
        loader = self._parts.loaders.shards(dataset, batch_size, others, **options)
        self.track({name: loader.queues}, DdpOptions.parse({}))
        return loader

    def track(self, things: dict[str, Any], options: DdpOptions, *, same_streams: bool = False) -> None:
        """`job.track`."""
        if self._started:
            raise Misuse("job.track after the first job.steps; track everything before training begins")
        parts, runner = self._parts, self._parts.data.runner
        if not parts.options.reference:
            check_no_process_group()
        first = not parts.tracked.objects
        for name, module in parts.tracked.add(things).items():
            runner.add_module(name, module, options)
        if first:
            runner.parts.contexts.start(same=same_streams)

    # The start.

    def start(self) -> None:
        """Before the first loop: workers compare what decides bits, and look for a checkpoint; a newcomer joins."""
        if self._started:
            return
        self._started = True
        parts = self._parts
        objects = parts.tracked.objects
        if parts.generation.joining:
            target = parts.transition.join(objects)
            parts.loops.resume_at(target.progress, finished=False)
            self._just_joined = True
            return
        compatibility = parts.checkpoints.describe(objects)
        parts.checkpoints.join()
        found, path, refused = parts.checkpoints.find()
        step = 0
        if found is not None:
            parts.loops.resume_at(found.progress, finished=found.finished)
            step = found.progress.step
        if parts.generation.is_main:
            virtual_workers = parts.generation.placement.virtual_workers
            parts.supervisor.started(step, path, refused, virtual_workers, parts.reduction, compatibility)

    def _load_if_at_end(self) -> None:
        if self._parts.loops.at_end:
            self._resume()

    def _resume(self) -> None:
        parts = self._parts
        parts.tracked.set_state(parts.checkpoints.restore(parts.tracked.objects))
        parts.loops.reached()
        parts.transition.arrived(self.progress)

    # The loops.

    def epochs(self, count: int) -> Iterator[int]:
        """`job.epochs`."""
        loops = self._parts.loops
        self.start()
        self._close_open_loop()
        left = loops.begin_epochs(count)
        try:
            for epoch in left:
                loops.begin_epoch(epoch)
                yield epoch
                self._close_open_loop()
        except GeneratorExit:
            self._left_at.append(script_place())
            raise
        finally:
            self._close_open_loop()
            loops.end_epochs()
        self._load_if_at_end()

    def steps(self, loader: OrderedLoader, accumulate: int, limit: int | None) -> Iterator[Step]:
        """`job.steps`."""
        parts, loops = self._parts, self._parts.loops
        if not parts.tracked.modules:
            raise Misuse("job.steps before job.track; track the model and its optimizer first")
        self.start()
        self._close_open_loop()
        order = loader.order(seed=parts.seed, epoch=self.epoch) if loader.ordered else None
        done = loops.begin_steps()
        if done is None:
            loops.end_steps()
            self._load_if_at_end()
            return
        if loops.resuming:
            self._resume()
        steps = StepLoop(self, parts.data, loader, order, accumulate, limit).run(done)
        self._open = steps
        self._pulled = loader if isinstance(loader, ShardLoader) else None
        try:
            for step in steps:
                yield step
                if self._open is not steps:
                    raise Misuse(
                        "this job.steps loop was ended by another one; loops over steps cannot be interleaved"
                    )
        except GeneratorExit:
            self._left_at.append(script_place())
            raise
        finally:
            if self._open is steps:
                self._close_open_loop()

    def _close_open_loop(self) -> None:
        steps, self._open = self._open, None
        if steps is not None:
            steps.close()
            self._parts.loops.end_steps()

    # One step.

    def begin_step(self, step: Step, samples: int | None) -> None:
        """`step` is handed out."""
        self.current_step = step
        self._parts.reports.begin_step(samples)

    def pass_done(self) -> None:
        parts, outcome = self._parts, self._parts.data.runner.outcome
        parts.reports.pass_done(outcome, first=self.progress.pass_ == 0)
        self._requests |= outcome.requests
        parts.transition.pass_done(outcome, self.progress)
        parts.loops.pass_done()

    def _before_update(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        parts = self._parts
        if parts.generation.joining:
            return  # a newcomer replays the updates of the others
        if parts.data.runner.micro_batch is not None:
            raise Misuse(
                "optimizer.step() inside the inner loop; move it below `for … in step:`, where gradients are the mean over "
                "all virtual workers"
            )
        if self.current_step is not None and self.current_step.broken_off:
            self.current_step.require_complete()
        parts.checkpoints.before_update()
        name = parts.tracked.name_of(optimizer)
        if name is not None:
            if self._started:
                check_update(name, optimizer, parts.tracked.modules, parts.reduced())
            parts.transition.before_update(name, optimizer, args, kwargs)
        elif self._started:
            raise Misuse(
                f"an untracked {type(optimizer).__name__} made an update; its state would be lost when the job moves. "
                "Track it: job.track(…, optimizer=optimizer)"
            )

    def leave_step(self, step: Step, *, broke: bool) -> None:
        """The script asks for the next step, or left the loop by `break`."""
        if not broke:
            step.require_complete()
        if broke and step.broken_off:
            self._broken = (
                step  # an exception cannot be raised while a loop is closed: the next call raises it
            )
        if step.passes and not step.broken_off:
            self._parts.loops.step_done()
            if self._pulled is not None:
                self._pulled.queues.done(self.progress.done)
            self._parts.reports.step_done(self.epoch)

    # The boundary.

    def boundary(self) -> None:
        """Everything before is complete on all workers, and a step is about to be handed out."""
        if self._broken is not None:
            self._broken.require_complete()
        if self._just_joined:
            self._just_joined = False  # the others did all this before the generation began
            self._evaluations = 0
            self._parts.transition.hold(self._here())
            return
        parts, step = self._parts, self.progress.step
        parts.reports.trace_update(step)
        self._report_step()
        probe = parts.options.probe
        if step % (_COMPARE_EVERY if probe is None else probe.every) == 0:
            parts.compare_replicas(self.progress)
        requests, self._requests = self._requests, Requests()
        if requests.stop or parts.options.stop_after == step:
            parts.checkpoints.last(self._here(), finished=False)
            raise JobStopRequested(0)
        parts.checkpoints.boundary(self._here(), asked=requests.checkpoint, written=requests.written)
        parts.transition.boundary(self._here())
        self._evaluations = 0

    def _report_step(self) -> None:
        if self._parts.reports.flush(self.progress.step):
            self._parts.checkpoints.writer_lost()

    def _here(self) -> Boundary:
        tracked, loops = self._parts.tracked, self._parts.loops
        self._evaluated = {
            place: results for place, results in self._evaluated.items() if loops.passes_again(place)
        }
        return Boundary(tracked.objects, tracked.state, self.progress, self._evaluated)

    # What the script may ask for between steps, and in them.

    def mean(self, value: torch.Tensor | float, kind: MeanKind = MeanKind.MEAN) -> Mean:
        """`job.mean`, `job.sum` and `job.gather`."""
        return self._parts.data.runner.mean(value, kind)

    def evaluate(self, loader: OrderedLoader, fn: Callable[[Any], Any]) -> list[Any]:
        """`job.evaluate`."""
        parts = self._parts
        if parts.data.runner.micro_batch is not None:
            raise Misuse("job.evaluate inside the inner loop; call it after the update")
        here = parts.loops.place()
        place = None if here is None else (*here, sum(key[:-1] == here for key in self._evaluated))
        known = parts.checkpoints.evaluations() if parts.loops.resuming else {}
        if place is not None and place in known:  # the state that it evaluated has not been loaded yet
            results = list(known[place])
        elif self._just_joined and parts.loops.resuming:
            raise Misuse(
                f"job.evaluate at a place where the other workers have not called it (before {parts.loops.target}); call it on "
                "all workers"
            )
        else:  # a newcomer that has not joined is alone: before its first loop it has the state that all began with
            results = parts.evaluator.run(loader, fn, parts.tracked.modules, self.progress, self._evaluations)
        self._evaluations += 1
        if place is not None:
            self._evaluated[place] = results
        return results

    def log(self, metrics: dict[str, float]) -> None:
        """`job.log`."""
        if not self.is_behind:
            self._parts.reports.log(self.progress.step, metrics)

    def save(self) -> None:
        """`job.save`."""
        self._parts.checkpoints.require_directory()
        if not self.is_behind:
            self._requests |= Requests(checkpoint=True)

    def in_every_stream(self, do: Callable[[], Any]) -> None:
        """`job.between_steps.in_every_stream`."""
        if self._parts.data.runner.micro_batch is not None:
            raise Misuse(
                "job.between_steps.in_every_stream inside the inner loop, where a virtual worker's streams are in force"
            )
        if not self._parts.tracked.modules:
            do()  # the streams of virtual workers have not begun
        elif not self.is_behind:
            self._parts.data.batches.in_every_stream(do)

    def exchange(self, kind: str, payload: Callable[[], bytes]) -> list[bytes]:
        """The payloads of all workers; of this one, if it is not with the others."""
        if self.is_behind:
            return [payload()]
        return self._parts.data.collectives.exchange(kind, self.progress, payload)

    @property
    def is_behind(self) -> bool:
        """The script repeats what the job has done before: it has not joined, or not reached the place where it resumes."""
        return self._parts.generation.joining or self._parts.loops.resuming

    # The end.

    def hand_over(self) -> None:
        """Other loops take the place of these."""
        if self._started or self._parts.tracked.objects:
            raise Misuse(
                "gyrostat.servers after job.track or the first loop; call it directly after gyrostat.init"
            )
        self._hook.remove()

    def finish(self, exit: SystemExit | None = None) -> None:
        """The script has ended, which is a boundary: workers agree that they are equal, and a last checkpoint is written.

        A script that called `exit` inside its loops has left work undone, and is at no boundary: a resumed one goes on from
        the newest checkpoint before.
        """
        parts, collectives = self._parts, self._parts.data.collectives
        self._hook.remove()
        if parts.generation.joining:
            raise Misuse(
                "the script of a new worker ended before its first loop, where it would have joined the job; it must run as it "
                "did on the other workers"
            )
        self._close_open_loop()
        midway = exit is not None and any(place in places_of(exit) for place in self._left_at)
        if self._broken is not None:
            self._broken.require_complete()
        if parts.loops.resuming:
            raise Misuse(
                f"the script ended before the place where its checkpoint was taken ({parts.loops.target}); run it with as many "
                "epochs as before or more, or start anew with --no-resume"
            )
        collectives.exchange("end", self.progress, lambda: b"")
        while True:
            parts.reports.watch_main()
            self._report_step()
            parts.compare_replicas(self.progress)
            self._last_checkpoint(midway=midway)
            digest = digest_of(tensor_digests(**parts.tracked.objects)).encode()
            # Buffers of DDP's other ranks are their own; the job's are rank 0's.
            digests = collectives.exchange("digest", self.progress, partial(bytes, digest))
            if (
                not parts.reports.main_lost
            ):  # otherwise another worker does what the dead one may have left undone
                break
        parts.generation.group.tracer.close()
        parts.supervisor.finished(self.progress.step, digests[0].decode())

    def _last_checkpoint(self, *, midway: bool) -> None:
        parts = self._parts
        if midway:
            parts.checkpoints.left_midway(self.progress)
        elif self._started:
            parts.checkpoints.last(self._here(), finished=True)
