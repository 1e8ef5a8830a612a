"""`Job`: the surface that a training script uses. It joins the script's loops to the runner below.

A script tracks its objects, then loops over epochs, steps and micro-batches. Everything that must happen at a boundary
(comparing replicas, checkpoints, stopping, resuming) happens in `boundary`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import Dataset

from gyrostat.core.errors import Misuse, UsageError
from gyrostat.core.job import Assignment, RecoveryMode, ReductionChoice
from gyrostat.core.progress import Progress
from gyrostat.data.loader import OrderedLoader
from gyrostat.data.options import make_loader
from gyrostat.data.order import Shuffle
from gyrostat.data.shard_loader import ShardLoader, make_shard_loader
from gyrostat.engine.checkpoint.capture import take_shared
from gyrostat.engine.checkpoint.manager import Boundary, CheckpointManager
from gyrostat.engine.reconfigure.membership import Membership
from gyrostat.engine.reconfigure.recovery import Recovery
from gyrostat.engine.reconfigure.transition import Transition
from gyrostat.engine.reduce.buckets import DdpOptions
from gyrostat.engine.script.checks import (
    check_module,
    check_no_process_group,
    check_optimizer,
    check_separate,
    check_trackable,
    check_update,
)
from gyrostat.engine.script.exits import Place, places_of, script_place
from gyrostat.engine.script.loops import Loops
from gyrostat.engine.script.step import Step, StepLoop
from gyrostat.engine.state.digest import digest_of, tensor_digests
from gyrostat.engine.supervisor import Supervisor
from gyrostat.engine.trace import now
from gyrostat.engine.training.backups import ContextBackups
from gyrostat.engine.training.mean import Mean
from gyrostat.engine.training.replicas import compare_replicas
from gyrostat.engine.training.runner import RequestBox, Requests, Runner
from gyrostat.engine.training.virtual import VirtualRunner

_COMPARE_EVERY = 100
_HEARD_AFTER_NS = 10_000_000_000
"""What a worker says leaves its process within this time."""


class JobStopRequested(SystemExit):
    """The job was asked to stop: it has checkpointed at a boundary and ends here, in every worker."""


class Job:
    """This process's part of a training job."""

    def __init__(
        self,
        *,
        assignment: Assignment,
        runner: Runner,
        supervisor: Supervisor,
        seed: int,
        device: torch.device,
        fingerprint: dict[str, str],
        reduction: ReductionChoice,
        membership: Membership | None = None,
    ) -> None:
        self._joining = assignment.joins
        self._just_joined = False
        self.device = device
        self.seed = seed
        self.state: dict[str, Any] = {}
        """Shared values of the script: equal on all workers, saved in checkpoints."""
        self.tracked: dict[str, Any] = {}
        self.current_step: Step | None = None
        self._assignment, self._runner, self._supervisor = assignment, runner, supervisor
        self._loops = Loops()
        self._open: Any = None
        self._pulled: ShardLoader | None = None  # the running loop's loader, if it has shards
        self._samples: int | None = 0
        self._loaders = 0
        self._generators: dict[int, tuple[Any, int]] = {}  # given to loaders, with the first loader of each
        self._loss: float | None = None
        self._busy: tuple[float, ...] = ()  # of each worker, in all passes of the step
        self._unreported_epoch: int | None = None  # of a step that is done but not yet reported
        self._broken: Step | None = None
        self._evaluated: dict[tuple[int, ...], list[Any]] = {}  # results since the last boundary, by place
        self._update_began = 0
        self._said: deque[tuple[int, Callable[[], None]]] = deque()  # by the main worker, of late
        self._say_again = False
        self._main_lost = False
        self._started = False
        self._save_asked = Requests()
        self._left_at: list[Place] = []  # where the script left loops that were not used up
        self._modules: dict[str, nn.Module] = {}
        self._checkpoints = (
            CheckpointManager(assignment.checkpoint, runner, fingerprint, seed, supervisor)
            if isinstance(runner, VirtualRunner)
            else None
        )
        self._transition: Transition | None = None
        if membership is not None and isinstance(runner, VirtualRunner) and self._checkpoints is not None:
            self._transition = Transition(
                membership, runner, self._checkpoints, supervisor, holds=assignment.holds, seed=seed
            )
            if assignment.recovery is not RecoveryMode.CHECKPOINT:
                runner.backups = ContextBackups()
                runner.approximate = assignment.recovery is RecoveryMode.APPROXIMATE
                runner.rescue = Recovery(
                    runner,
                    membership,
                    supervisor,
                    step=lambda: self.progress.step,
                    micro_batches=lambda: 1 if self.current_step is None else self.current_step.micro_batches,
                    moved=self._recovered,
                )
        self._fingerprint, self._reduction = fingerprint, reduction
        self._hook = register_optimizer_step_pre_hook(self._before_update)

    # What the script can ask.

    @property
    def virtual_workers(self) -> int:
        """N, the number of virtual workers."""
        return self._runner.placement.virtual_workers

    @property
    def is_main(self) -> bool:
        """True on the worker that runs virtual worker 0."""
        return self._runner.leads and not self._joining

    @property
    def step(self) -> int:
        """The number of steps completed before the one that is running."""
        return self.progress.step

    @property
    def epoch(self) -> int:
        """The epoch that is running; 0 outside `job.epochs`."""
        return max(self.progress.epoch, 0)

    @property
    def has_others(self) -> bool:
        """Other workers are in the job, or it has not let this one in yet."""
        return self._joining or self._runner.group.size > 1

    @property
    def progress(self) -> Progress:
        return self._loops.progress

    # Setting up.

    def dataloader(
        self,
        dataset: Dataset[Any] | Callable[[int], Dataset[Any]],
        batch_size: int | Sequence[int] | None = 1,
        shuffle: Shuffle = False,
        *,
        num_workers: int = 0,
        drop_last: bool = False,
        pad: bool = True,
        pin_memory: bool = False,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        **others: Any,
    ) -> OrderedLoader:
        """Like `DataLoader` with a `DistributedSampler` over the N virtual workers; `batch_size` is per virtual worker.

        A list gives each virtual worker a size of its own. Then every sample is seen exactly once per epoch, without padding,
        and gradients are averaged by weight. `shuffle="bijection"` computes the order instead of storing it, for datasets
        of which 8 bytes per sample are too much.

        All other options are DataLoader's, with the meaning they have on every rank; `dataset`, `sampler` and `batch_sampler`
        may be callables that make those of a virtual rank. `num_workers` data workers serve all virtual workers of a worker.
        """
        number, generator = self._number_loader(), others.get("generator")
        _, owner = self._generators.setdefault(id(generator), (generator, number))
        loader = make_loader(
            dataset,
            batch_size=self._batch_size(batch_size, others),
            virtual_workers=self.virtual_workers,
            shuffle=shuffle,
            num_workers=num_workers,
            drop_last=drop_last,
            pad=pad,
            pin_memory=pin_memory,
            collate_fn=collate_fn,
            others=others,
            number=number,
            generator_owner=owner,
            ranks=self._runner.hosted,
        )
        if self._transition is not None:
            self._transition.loaders[number] = loader
        return loader

    def shards(
        self,
        dataset: Dataset[Any],
        batch_size: int | Sequence[int] = 1,
        *,
        shard_size: int,
        shuffle: bool = True,
        num_workers: int = 0,
        drop_last: bool = False,
        pin_memory: bool = False,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        name: str = "shards",
        **others: Any,
    ) -> ShardLoader:
        """A loader whose virtual workers pull shards of `shard_size` samples when they need one; every sample exactly once.

        Its queues are tracked under `name`, and saved and restored with everything else that is tracked. All other options are
        those of `job.dataloader`.
        """
        loader = make_shard_loader(
            dataset,
            batch_size=self._batch_size(batch_size, others),
            shard_size=shard_size,
            virtual_workers=self.virtual_workers,
            seed=self.seed,
            shuffle=shuffle,
            num_workers=num_workers,
            drop_last=drop_last,
            pin_memory=pin_memory,
            collate_fn=collate_fn,
            others=others,
            number=self._number_loader(),
        )
        tracked: dict[str, Any] = {name: loader.queues}
        self.track(**tracked)
        return loader

    def _batch_size(self, given: Any, others: dict[str, Any]) -> Any:
        """What the script says, unless the job is there to measure another."""
        measured = self._assignment.batch_size
        if measured is None:
            return given
        if given is None or others.get("batch_sampler") is not None:
            raise UsageError(
                f"batches of {measured} samples are to be measured, but this loader leaves batches to its dataset or "
                "batch_sampler; give it a batch_size"
            )
        return measured

    def _number_loader(self) -> int:
        number, self._loaders = self._loaders, self._loaders + 1
        return number

    def track(self, *, ddp: dict[str, Any] | None = None, **things: Any) -> None:
        """Hand over what the job must keep: modules, optimizers, schedulers, scalers. `ddp`: options as for DDP."""
        if self._started:
            raise Misuse("job.track after the first job.steps; track everything before training begins")
        options = DdpOptions.parse(ddp or {})
        if not self._assignment.reference:
            check_no_process_group()
        modules = {name: thing for name, thing in things.items() if isinstance(thing, nn.Module)}
        for name, thing in things.items():
            if name in self.tracked:
                raise Misuse(f"job.track({name}=…) twice; give every tracked object a name of its own")
            check_trackable(name, thing)
        for name, module in modules.items():
            check_module(name, module)
        check_separate(self._modules | modules)
        for name, thing in things.items():
            if isinstance(thing, Optimizer):
                check_optimizer(name, thing, self._modules | modules)
        first = not self.tracked
        self.tracked |= things
        self._modules |= modules
        for name, module in modules.items():
            self._runner.add_module(name, module, options)
        if first:
            self._runner.start_streams()

    # The loops.

    def epochs(self, count: int) -> Iterator[int]:
        """The epochs 0 … count-1, less those that a resumed job has behind it."""
        if not isinstance(count, int) or count < 0:
            raise UsageError(f"job.epochs needs a whole number of epochs, got {count!r}")
        return self._epochs(count)

    def _epochs(self, count: int) -> Iterator[int]:
        self._start()
        self._close_open_loop()
        left = self._loops.begin_epochs(count)
        try:
            for epoch in left:
                self._loops.begin_epoch(epoch)
                yield epoch
                self._close_open_loop()
        except GeneratorExit:
            self._left_at.append(script_place())
            raise
        finally:
            self._close_open_loop()
            self._loops.end_epochs()
        self._load_if_at_end()

    def steps(self, loader: OrderedLoader, accumulate: int = 1, limit: int | None = None) -> Iterator[Step]:
        """The steps of one epoch over `loader`; at most `limit`; `accumulate` micro-batches each per virtual worker."""
        if not isinstance(loader, OrderedLoader):
            raise UsageError(
                f"job.steps needs a loader made by job.dataloader, got a {type(loader).__name__}"
            )
        if not isinstance(accumulate, int) or accumulate < 1:
            raise UsageError(f"accumulate must be a whole number of at least 1, got {accumulate!r}")
        if limit is not None and (not isinstance(limit, int) or limit < 0):
            raise UsageError(f"limit must be a whole number of at least 0, or None, got {limit!r}")
        if accumulate > 1 and loader.sizes is not None:
            raise UsageError("accumulate needs equal batch sizes; this loader has shards, or a list of them")
        return self._steps(loader, accumulate, limit)

    def _steps(self, loader: OrderedLoader, accumulate: int, limit: int | None) -> Iterator[Step]:
        if not self._modules:
            raise Misuse("job.steps before job.track; track the model and its optimizer first")
        self._start()
        self._close_open_loop()
        order = loader.order(seed=self.seed, epoch=self.epoch) if loader.ordered else None
        done = self._loops.begin_steps()
        if done is None:
            self._loops.end_steps()
            self._load_if_at_end()
            return
        if self._loops.resuming:
            self._resume()
        steps = StepLoop(self, self._runner, loader, order, accumulate, limit).run(done)
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
            self._loops.end_steps()

    def _recovered(self, main_lost: bool, wait_at: int | None) -> None:
        """Another worker was lost. If it spoke for the job, whoever does now says again what may not have been heard."""
        assert self._transition is not None
        self._transition.recovered(wait_at)
        self._say_again |= main_lost
        self._main_lost |= main_lost

    # Boundaries.

    def begin_step(self, step: Step, samples: int | None) -> None:
        """`step` is handed out."""
        self.current_step, self._samples = step, samples

    def leave_step(self, step: Step, *, broke: bool) -> None:
        """The script asks for the next step, or left the loop by `break`."""
        if not broke:
            step.require_complete()
        if broke and step.broken_off:
            self._broken = step  # an exception cannot be raised while a loop is torn down: the next call does
        if step.passes and not step.broken_off:
            self._loops.step_done()
            if self._pulled is not None:
                self._pulled.queues.done(self.progress.done)
            self._unreported_epoch = self.epoch

    def pass_done(self) -> None:
        outcome = self._runner.outcome
        if self.progress.pass_ == 0:
            self._loss, self._busy = outcome.loss, outcome.busy
        else:
            self._busy = tuple(map(sum, zip(self._busy, outcome.busy, strict=False)))
        if self._samples is None:
            self._samples = outcome.samples
        self._save_asked |= outcome.requests
        if self._transition is not None:
            self._transition.pass_done(outcome, self.progress)
        self._loops.pass_done()
        self._update_began = now()

    def boundary(self) -> None:
        """Everything before is complete on all workers, and a step is about to be handed out."""
        if self._broken is not None:
            self._broken.require_complete()
        if self._just_joined:
            self._just_joined = False  # the others had done all this when the generation began
            return
        if self._unreported_epoch is not None:
            self._runner.group.tracer.add("update", self._update_began, now(), step=self.progress.step - 1)
        self._report_step()
        every = _COMPARE_EVERY if self._assignment.probe is None else self._assignment.probe.every
        if self.progress.step % every == 0:
            self._compare_replicas()
        asked, self._save_asked = self._save_asked, Requests()
        stop = asked.stop or self._assignment.stop_after == self.progress.step
        if self._checkpoints is not None:
            if stop:
                self._checkpoints.last(self._here(), finished=False)
            else:
                self._checkpoints.boundary(self._here(), asked=asked.checkpoint, written=asked.written)
        if stop:
            raise JobStopRequested(0)
        if self._transition is not None:
            self._transition.boundary(self._here())
        self._evaluated = {}

    def _here(self) -> Boundary:
        return Boundary(self.tracked, self.state, self.progress, self._evaluated)

    def _compare_replicas(self) -> None:
        if isinstance(self._runner, VirtualRunner) and self._runner.group.size > 1:
            shared = take_shared(self.tracked, self.state, self._runner)
            compare_replicas(shared, self._runner, self.progress)

    def _report_step(self) -> None:
        if self._say_again and self.is_main:
            for _, say in self._said:
                say()
            if self._checkpoints is not None:
                self._checkpoints.writer_lost()
        self._say_again = False
        epoch, self._unreported_epoch = self._unreported_epoch, None
        if epoch is None:
            return
        step = self.progress.step
        stepped = partial(self._supervisor.stepped, step, epoch, self._loss, self._samples or 0, self._busy)
        self._say(stepped)
        probe = self._assignment.probe
        if probe is None or step < probe.first or (probe.last is not None and step > probe.last):
            return
        if step % probe.every == 0 and self.is_main:
            leaves = tensor_digests(**self.tracked)
            self._supervisor.probed(step, digest_of(leaves), leaves if probe.tensors else {})

    def _before_update(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._joining:
            return  # it follows the others
        if self._runner.micro_batch is not None:
            raise Misuse(
                "optimizer.step() inside the inner loop; move it below `for … in step:`, where gradients are the mean over "
                "all virtual workers"
            )
        if self.current_step is not None and self.current_step.broken_off:
            self.current_step.require_complete()
        if self._checkpoints is not None:
            self._checkpoints.before_update()
        name = next((name for name, thing in self.tracked.items() if thing is optimizer), None)
        if self._started and name is not None:
            check_update(name, optimizer, self._modules, self._runner.reduced)
        if self._transition is not None and name is not None:
            self._transition.before_update(name, optimizer, args, kwargs)
        if self._started and name is None:
            raise Misuse(
                f"an untracked {type(optimizer).__name__} made an update; its state would be lost when the job moves. "
                "Track it: job.track(…, optimizer=optimizer)"
            )

    # During and after an epoch.

    def mean(self, value: torch.Tensor | float) -> Mean:
        """In a micro-batch: a handle to the mean of `value` over all N, readable after the inner loop."""
        return self._runner.mean(value)

    def evaluate(self, loader: OrderedLoader, fn: Callable[[Any], Any]) -> list[Any]:
        """fn(micro-batch) for every micro-batch of the loader's dataset, in dataset order, on every worker.

        The virtual workers share the work; each sample is seen once. Runs without gradients, with tracked modules in
        eval mode, on random streams of its own; leaves modes, buffers and streams as they were.
        """
        if not isinstance(loader, OrderedLoader):
            raise UsageError(
                f"job.evaluate needs a loader made by job.dataloader, got a {type(loader).__name__}"
            )
        if self._joining:
            self._start()  # what it evaluates is the job's, and that is somewhere else
        here = self._loops.place()
        place = (*here, sum(key[:-1] == here for key in self._evaluated))
        known = (
            self._checkpoints.evaluations() if self._checkpoints is not None and self._loops.resuming else {}
        )
        if place in known:  # the state it ran on has not been loaded yet
            results = list(known[place])
        else:
            results = self._runner.evaluate(loader, fn, self.progress, len(self._evaluated))
        self._evaluated[place] = results
        return results

    def log(self, **metrics: float) -> None:
        """Report numbers of the script: shown live by `gyrostat run`, and part of its report."""
        if self._loops.resuming:
            return
        logged = partial(
            self._supervisor.logged,
            self.progress.step,
            {name: float(value) for name, value in metrics.items()},
        )
        self._say(logged)

    def _say(self, what: Callable[[], None]) -> None:
        """The main worker says it. The others remember it for a while: it may be killed before anybody has heard it."""
        at = now()
        while self._said and at - self._said[0][0] > _HEARD_AFTER_NS:
            self._said.popleft()
        self._said.append((at, what))
        if self.is_main:
            what()

    def save(self) -> None:
        """Checkpoint at the next boundary. Call it on all workers alike."""
        if self._checkpoints is not None:
            self._checkpoints.require_directory()
        if not self._loops.resuming:
            self._save_asked |= Requests(checkpoint=True)

    # Checkpoints, the start and the end.

    def listen_to(self, box: RequestBox) -> None:
        """Requests from outside come through `box`: all workers will know when the next pass has settled."""
        self._runner.request_box = box

    def _start(self) -> None:
        """Before the first loop: all workers must be alike; a checkpoint is looked for."""
        if self._started:
            return
        self._started = True
        if self._joining:
            self._join()
            return
        refused: list[str] = []
        found: str | None = None
        alike: dict[str, str] = {}
        step = 0
        if self._checkpoints is not None:
            alike = self._checkpoints.describe(self.tracked)
            self._checkpoints.join()
            target, found, refused = self._checkpoints.find()
            if target is not None:
                self._loops.resume_at(target.progress, finished=target.finished)
                step = target.progress.step
        if self.is_main:
            self._supervisor.started(step, found, refused, self.virtual_workers, self._reduction, alike)

    def _join(self) -> None:
        """A running job: go on from the boundary at which a generation with this worker begins."""
        assert self._transition is not None
        target = self._transition.join(self.tracked)
        self._loops.resume_at(target.progress, finished=False)
        self._joining, self._just_joined = False, True

    def _load_if_at_end(self) -> None:
        if self._loops.at_end:
            self._resume()

    def _resume(self) -> None:
        assert self._checkpoints is not None
        self.state = self._checkpoints.restore(self.tracked)
        self._loops.reached()
        if self._transition is not None:
            self._transition.arrived(self.progress)

    def finish(self, exit: SystemExit | None = None) -> None:
        """The script has ended; its end is a boundary. Workers agree that they are equal, and a last checkpoint is written.

        A script that made its `exit` inside its loops has left work undone, and is at no boundary: a resumed one goes on
        from the newest checkpoint before.
        """
        self._hook.remove()
        self._close_open_loop()
        midway = exit is not None and any(place in places_of(exit) for place in self._left_at)
        if self._broken is not None:
            self._broken.require_complete()
        if self._loops.resuming:
            raise Misuse(
                f"the script ended before the place where its checkpoint was taken ({self._loops.target}); run it with as many "
                "epochs as before or more, or start anew with --no-resume"
            )
        self._runner.exchange("end", self.progress, lambda: b"")
        while True:
            self._main_lost = False
            self._report_step()
            self._compare_replicas()
            if midway and self._checkpoints is not None:
                self._checkpoints.left_midway(self.progress)
            elif self._checkpoints is not None and self._started:
                self._checkpoints.last(Boundary(self.tracked, self.state, self.progress, {}), finished=True)
            leaves = tensor_digests(**self.tracked)
            mine = digest_of(leaves).encode()
            # Buffers of DDP's other ranks are their own; the job's are rank 0's.
            shared = self._runner.exchange("digest", self.progress, partial(bytes, mine))[0]
            if not self._main_lost:  # else what it may have left undone is done by another
                break
        self._runner.group.tracer.close()
        self._supervisor.finished(self.progress.step, shared.decode())

    def __repr__(self) -> str:
        return f"Job(virtual_workers={self.virtual_workers}, {self.progress})"
