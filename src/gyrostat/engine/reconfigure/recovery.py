"""What a worker does when another one is lost: find those that are left, learn what it missed, take over what nobody has.

Only the job's leader declares a death. It names the members of a generation that begins at once, in the middle of whatever they
are doing, and every one of them connects in a thread of its own (`membership.py`). The script's thread comes here when it fails
to do something together with the others, or finds the generation that it is in superseded:

1. All say how many units they have completed, and which virtual workers they run. Two of them are never more than one unit
   apart, for nobody completes a unit that another has not begun.
2. Who is behind gets from one who is not what came of the unit: what all had said and, of a reduction, the sums and buffers.
3. All compute alike who runs which virtual workers from now on: everybody's own stay, and those of the lost are shared out.

If yet another worker is lost meanwhile, the leader declares another generation, and it begins again at 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from gyrostat.core.errors import Diverged, PeerLost
from gyrostat.core.placement import Placement, Segment
from gyrostat.core.progress import Progress
from gyrostat.engine.reconfigure.membership import Membership
from gyrostat.engine.reduce.gradients import ModuleParticipation
from gyrostat.engine.supervisor import Supervisor
from gyrostat.engine.trace import now
from gyrostat.engine.training.runner import PassReport
from gyrostat.engine.training.virtual import RecoveryResult, VirtualRunner
from gyrostat.engine.transport.group import WorkerGroup


class SurvivorReport(msgspec.Struct, frozen=True, array_like=True):
    """How far a worker is, and which virtual workers it runs."""

    completed_collectives: int
    hosted: tuple[int, ...]
    step: int
    """Complete, so far."""


class Recovery:
    """Brings this worker together with those that are left."""

    def __init__(
        self,
        runner: VirtualRunner,
        membership: Membership,
        supervisor: Supervisor,
        *,
        step: Callable[[], int],
        micro_batches: Callable[[], int],
        moved: Callable[[bool, int | None], None],
    ) -> None:
        """`step`: how many are complete. `micro_batches`: of the step that is running.

        `moved` hears that another generation is in force: whether the main worker was lost, and at which step to wait.
        """
        self._runner, self._membership, self._supervisor = runner, membership, supervisor
        self._step, self._micro_batches, self._moved = step, micro_batches, moved

    def __call__(self, lost: PeerLost, *, in_pass: bool) -> RecoveryResult:
        began = now()
        runner = self._runner
        runner.group.close()
        generation = runner.group.generation
        while True:
            self._supervisor.lost(generation, str(lost))
            rescue = self._membership.wait_for_rescue(generation, lost)
            assert rescue.group is not None
            generation = rescue.plan.generation
            try:
                standings, told = self._agree(rescue.group, in_pass=in_pass)
            except PeerLost as another:
                rescue.group.close()
                lost = another
                continue
            break
        placement = share_out(standings, runner.placement.virtual_workers)
        mine = set(placement.held_by(rescue.group.rank)) - set(runner.hosted)
        runs_again = in_pass and told is None and not runner.approximate
        again = len(mine) * self._micro_batches() if runs_again else 0
        self._membership.moved(rescue.plan)
        # A boundary that nobody has behind it.
        wait_at = max(standing.step for standing in standings) + 1 if rescue.plan.waits else None
        self._moved(all(0 not in standing.hosted for standing in standings), wait_at)
        self._supervisor.recovered(generation, placement, again, (now() - began) / 1e9)
        return RecoveryResult(placement, rescue.group, told)

    def _agree(self, group: WorkerGroup, *, in_pass: bool) -> tuple[list[SurvivorReport], list[bytes] | None]:
        runner = self._runner
        mine = SurvivorReport(runner.completed_collectives, tuple(runner.hosted), self._step())
        standings = [
            msgspec.msgpack.decode(payload, type=SurvivorReport)
            for payload in group.exchange("recover", Progress(), msgspec.msgpack.encode(mine))
        ]
        completed_collectives = [standing.completed_collectives for standing in standings]
        furthest = max(completed_collectives)
        if min(completed_collectives) < furthest - 1:
            raise Diverged(
                f"workers are further apart than can be: they have completed {completed_collectives} units"
            )
        behind = [worker for worker, completed in enumerate(completed_collectives) if completed < furthest]
        if not behind:
            return standings, None
        donor = completed_collectives.index(furthest)
        payload = msgspec.msgpack.encode(runner.last_collective) if group.rank == donor else b""
        said = group.exchange("missed", Progress(), payload)[donor]
        told = msgspec.msgpack.decode(said, type=list[bytes])
        if group.rank == donor:
            self._hand_out(group, behind)
        elif group.rank in behind:
            if in_pass:
                self._receive(group, donor, told)
            return standings, told
        return standings, None

    def _hand_out(self, group: WorkerGroup, behind: Sequence[int]) -> None:
        runner = self._runner
        if not runner.last_was_pass:
            return
        tensors = [
            flat
            for number, gradients in enumerate(runner.gradients)
            if _touched(runner.last_collective, number)
            for flat in gradients.reduction.last_sum()
        ]
        if runner.buffers and runner.last_buffers is not None:
            tensors.append(runner.last_buffers)

        def send() -> None:
            messages = [(tensor, worker, tag) for worker in behind for tag, tensor in enumerate(tensors)]
            for pending in [group.send(*message) for message in messages]:
                pending.wait()

        group.reducer.submit(send, "hand out what was missed").wait()

    def _receive(self, group: WorkerGroup, donor: int, told: Sequence[bytes]) -> None:
        runner = self._runner
        tensors = [
            flat
            for number, gradients in enumerate(runner.gradients)
            if _touched(told, number)
            for flat in gradients.reduction.receive_sum()
        ]
        if runner.buffers:
            tensors.append(runner.room_for_buffers())

        def receive() -> None:
            for pending in [group.receive(tensor, donor, tag) for tag, tensor in enumerate(tensors)]:
                pending.wait()

        group.reducer.submit(receive, "receive what was missed").wait()
        if runner.buffers:
            runner.missed_buffers(tensors[-1])


def share_out(standings: Sequence[SurvivorReport], virtual_workers: int) -> Placement:
    """Who runs which virtual workers, when worker i has said `standings[i]`.

    Everybody keeps its own; of those that two claim, because only one of them has passed a fence, who is further does. The
    others go one by one to who has fewest, the first of them.
    """
    owner: dict[int, int] = {}
    for worker in sorted(
        range(len(standings)), key=lambda worker: (-standings[worker].completed_collectives, worker)
    ):
        for rank in standings[worker].hosted:
            owner.setdefault(rank, worker)
    counts = [sum(held == worker for held in owner.values()) for worker in range(len(standings))]
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


def _touched(payloads: Sequence[bytes], module: int) -> bool:
    """Whether gradients of this module have been reduced in a pass of which all said this."""
    reports = (msgspec.msgpack.decode(payload, type=PassReport) for payload in payloads)
    return any(
        msgspec.msgpack.decode(report.extra, type=list[ModuleParticipation])[module].touched > 0
        for report in reports
    )
