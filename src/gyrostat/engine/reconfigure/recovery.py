"""Recovery from the death of another worker: find the survivors, receive what was missed, take over its virtual workers.

Only the job's leader declares a death. It names the members of a generation that begins at once, in the middle of whatever they
are doing, and each of them connects in a thread of its own (`membership.py`). The script's thread comes here when a collective
fails, or when it finds its generation superseded:

1. All survivors exchange how many collectives they have completed, and which virtual workers they run. They are never more than
   one collective apart, because none completes one that another has not begun.
2. A survivor that is behind receives the outcome of the collective from one that is not: the payloads of all workers and, of a
   pass, the sums and buffers.
3. All compute the same new placement: survivors keep their virtual workers, and those of the dead worker are shared out.

If another worker is lost meanwhile, the leader declares another generation, and recovery begins again at 1.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import msgspec

from gyrostat.core.errors import Diverged, PeerLost
from gyrostat.core.placement import Placement, Segment
from gyrostat.core.progress import Progress
from gyrostat.engine.reconfigure.membership import Membership
from gyrostat.engine.reconfigure.phases import PreparedGeneration
from gyrostat.engine.supervisor import Supervisor
from gyrostat.engine.trace import now
from gyrostat.engine.training.plan import StepPlan
from gyrostat.engine.training.reports import decode
from gyrostat.engine.training.virtual_workers import VirtualWorkers
from gyrostat.engine.transport.group import WorkerGroup

logger = logging.getLogger(__name__)

OnRecovered = Callable[[bool, int | None], None]
"""Called when another generation is in force: whether the main worker died, and the step at which to wait for newcomers."""


class SurvivorReport(msgspec.Struct, frozen=True, array_like=True):
    """How far a survivor is, and which virtual workers it runs."""

    completed_collectives: int
    local_ranks: tuple[int, ...]
    step: int
    """Completed steps."""


class Recovery:
    """Brings this worker together with the other survivors. Implements `training.collectives.PeerRecovery`."""

    available = True

    def __init__(
        self,
        workers: VirtualWorkers,
        membership: Membership,
        supervisor: Supervisor,
        *,
        step: Callable[[], int],
    ) -> None:
        """`step`: how many are complete."""
        self._workers, self._membership, self._supervisor = workers, membership, supervisor
        self._step = step
        self._listeners: list[OnRecovered] = []

    def subscribe(self, listener: OnRecovered) -> None:
        self._listeners.append(listener)

    def recover(self, lost: PeerLost, plan: StepPlan | None) -> list[bytes] | None:
        began, workers = now(), self._workers
        logger.info(
            "recovery begins: %s",
            lost,
            extra={"generation": workers.generation.group.generation, "step": self._step()},
        )
        workers.buffers.interrupt()
        prepared, group, reports, missed = self._find_survivors(lost, in_pass=plan is not None)
        placement = share_out(reports, workers.generation.placement.virtual_workers)
        arrivals = set(placement.held_by(group.rank)) - set(workers.generation.local_ranks)
        self._membership.moved(prepared.plan)
        # A boundary that no survivor has passed.
        wait_at = max(report.step for report in reports) + 1 if prepared.plan.waits else None
        main_lost = all(0 not in report.local_ranks for report in reports)
        for listener in self._listeners:
            listener(main_lost, wait_at)
        repeats = plan is not None and missed is None and not workers.relocation.approximate
        again = len(arrivals) * plan.micro_batches if plan is not None and repeats else 0
        paused = (now() - began) / 1e9
        self._supervisor.recovered(group.generation, placement, again, paused)
        if missed is not None and plan is not None:
            workers.relocation.follow_after_pass(placement, group)
        else:
            workers.relocation.follow(placement, group, in_pass=plan is not None)
        logger.info(
            "recovered after %.0f ms: %d workers, %d micro-batches to repeat here",
            paused * 1e3,
            group.size,
            again,
            extra={"generation": group.generation, "step": self._step()},
        )
        return missed

    def _find_survivors(
        self, lost: PeerLost, *, in_pass: bool
    ) -> tuple[PreparedGeneration, WorkerGroup, list[SurvivorReport], list[bytes] | None]:
        """Until the survivors of some generation have agreed."""
        group = self._workers.generation.group
        while True:
            group.close()
            self._supervisor.lost(group.generation, str(lost))
            prepared = self._membership.wait_for_survivors(group.generation, lost)
            assert prepared.group is not None
            group = prepared.group
            try:
                reports, missed = self._agree(group, in_pass=in_pass)
            except PeerLost as another:
                lost = another
                continue
            return prepared, group, reports, missed

    def _agree(self, group: WorkerGroup, *, in_pass: bool) -> tuple[list[SurvivorReport], list[bytes] | None]:
        """Exchange reports, and hand on what some survivors missed. Returns what this one missed, if it did."""
        log, local_ranks = self._workers.log, self._workers.generation.local_ranks
        mine = SurvivorReport(log.completed, tuple(local_ranks), self._step())
        reports = [
            msgspec.msgpack.decode(payload, type=SurvivorReport)
            for payload in group.exchange("recover", Progress(), msgspec.msgpack.encode(mine))
        ]
        completed = [report.completed_collectives for report in reports]
        furthest = max(completed)
        if min(completed) < furthest - 1:
            raise Diverged(f"survivors are more than one collective apart: they have completed {completed}")
        behind = [worker for worker, count in enumerate(completed) if count < furthest]
        if not behind:
            return reports, None
        donor = completed.index(furthest)
        payload = msgspec.msgpack.encode(log.last) if group.rank == donor else b""
        payloads = group.exchange("missed", Progress(), payload)[donor]
        missed = msgspec.msgpack.decode(payloads, type=list[bytes])
        if group.rank == donor:
            self._send_missed(group, behind)
        elif group.rank in behind:
            if in_pass:
                self._receive_missed(group, donor, missed)
            return reports, missed
        return reports, None

    def _send_missed(self, group: WorkerGroup, behind: Sequence[int]) -> None:
        log, buffers = self._workers.log, self._workers.buffers
        if not log.last_was_pass:
            return
        tensors = self._workers.relocation.reducers.sums(_participations(log.last))
        if buffers.modules and buffers.last is not None:
            tensors.append(buffers.last)

        def send() -> None:
            messages = [(tensor, worker, tag) for worker in behind for tag, tensor in enumerate(tensors)]
            for pending in [group.send(*message) for message in messages]:
                pending.wait()

        group.reducer.submit(send, "send what was missed").wait()

    def _receive_missed(self, group: WorkerGroup, donor: int, missed: Sequence[bytes]) -> None:
        buffers = self._workers.buffers
        tensors = self._workers.relocation.reducers.room_for_sums(_participations(missed))
        if buffers.modules:
            tensors.append(buffers.empty_like_packed())

        def receive() -> None:
            for pending in [group.receive(tensor, donor, tag) for tag, tensor in enumerate(tensors)]:
                pending.wait()

        group.reducer.submit(receive, "receive what was missed").wait()
        if buffers.modules:
            buffers.receive_missed(tensors[-1])


def _participations(payloads: Sequence[bytes]) -> list[bytes]:
    """Of all workers, in a pass of which these are the reports."""
    return [report.participation for report in decode(payloads)]


def share_out(reports: Sequence[SurvivorReport], virtual_workers: int) -> Placement:
    """The placement after a death, where worker i has sent `reports[i]`.

    Survivors keep their virtual workers. If two claim the same one, because only one of them has passed a fence, the one with
    more completed collectives keeps it. The others go one by one to the first survivor with the fewest.
    """
    owner: dict[int, int] = {}
    for worker in sorted(
        range(len(reports)), key=lambda worker: (-reports[worker].completed_collectives, worker)
    ):
        for rank in reports[worker].local_ranks:
            owner.setdefault(rank, worker)
    counts = [sum(held == worker for held in owner.values()) for worker in range(len(reports))]
    for rank in range(virtual_workers):
        if rank not in owner:
            owner[rank] = counts.index(min(counts))
            counts[owner[rank]] += 1
    segments: list[Segment] = []
    for rank in range(virtual_workers):
        if segments and segments[-1].worker == owner[rank]:
            segments[-1] = Segment(owner[rank], segments[-1].start, rank + 1)
        else:
            segments.append(Segment(owner[rank], rank, rank + 1))
    return Placement(tuple(segments))
