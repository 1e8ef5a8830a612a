"""The tree of errors. A message says what happened, the value, and what to do about it.

GyrostatError
├── UsageError                 bad input: nothing was done; exit code 2
│   ├── Refused                a model or option that cannot be exact, found at `track`
│   ├── Misuse                 the surface was used in an order that has no meaning
│   ├── NotYet                 a capability that this version does not have
│   ├── NoSuchJob              a cluster has no job of that name or id, or it is somebody else's
│   ├── Unplaceable            a job that a cluster can never run, refused when it is submitted
│   ├── WrongState             what was asked of a job makes no sense in the state that it is in
│   └── StoreUnusable          a lease store that cannot be opened: wrong address, no server there, wrong credentials
├── ClusterUnreachable         no cluster, or none that answers
├── StorageFull                a cluster's disk takes nothing more; nothing was accepted; to be tried again when there is room
├── NotDone                    a running job could not do what it was asked for (in `job.door`)
├── CheckpointError            a checkpoint that cannot be used
│   ├── DamagedCheckpoint      cut off or bit-flipped
│   ├── ForeignCheckpoint      of another job
│   └── OtherFingerprint       of this job, but other hardware or settings decide its bits
├── MalformedState             bytes from disk or another worker that no state is written as
├── Diverged                   replicas that must be equal are not
├── LeaseError                 a lease store did not do what it was asked
│   ├── StoreUnreachable       it did not answer; it may have done it; to be tried again
│   ├── StoreRefused           it answered with an error
│   └── Deposed                a write or renewal under a lease that is over; nothing was written; never to be tried again
├── ProtocolError              a message that does not belong to the protocol (in `job.protocol`)
├── PeerLost                   another worker went away in the middle of a collective
└── ScriptFailed               the user's script raised, or one of its workers died
"""

from __future__ import annotations


class GyrostatError(Exception):
    """Whatever gyrostat itself raises. `exit_code` is what the command line returns for it."""

    exit_code = 1


class UsageError(GyrostatError):
    """Bad input. Nothing has been done."""

    exit_code = 2


class Refused(UsageError):
    """A model, optimizer or option that cannot give the bits of plain DDP."""


class Misuse(UsageError):
    """A call that has no meaning where it stands."""


class NotYet(UsageError):
    """A capability that this version does not have."""


class NoSuchJob(UsageError):
    """A cluster knows no such job, or the job is another tenant's, which is not told apart."""

    def __init__(self, message: str, suggestions: tuple[str, ...] = ()) -> None:
        """`suggestions`: names that exist and are near, the nearest first."""
        super().__init__(message)
        self.suggestions = suggestions


class Unplaceable(UsageError):
    """A job that this cluster can never run."""


class WrongState(UsageError):
    """What was asked of a job makes no sense in the state that it is in."""


class ClusterUnreachable(GyrostatError):
    """There is no cluster, or it does not answer; what it was asked last may have been done."""


class StorageFull(GyrostatError):
    """The cluster's disk takes nothing more. Nothing was accepted; trying again helps once there is room."""


class StoreUnusable(UsageError):
    """A lease store that cannot be opened."""


class CheckpointError(GyrostatError):
    """A checkpoint that cannot be used."""


class DamagedCheckpoint(CheckpointError):
    """Cut off, altered or unreadable."""


class ForeignCheckpoint(CheckpointError):
    """Written by another job."""


class OtherFingerprint(CheckpointError):
    """Written where other hardware or settings decide the bits."""


class MalformedState(GyrostatError):
    """Bytes or a skeleton that no state is written as. Nothing has been made of them."""


class LeaseError(GyrostatError):
    """A lease store did not do what it was asked."""


class StoreUnreachable(LeaseError):
    """No answer from a lease store. It may have done what it was asked; trying again may help."""


class StoreRefused(LeaseError):
    """A lease store answered with an error."""


class Deposed(LeaseError):
    """A write or renewal under a lease that is over. Nothing was written, and trying again cannot help."""


class Diverged(GyrostatError):
    """Replicas that must be equal are not."""


class PeerLost(GyrostatError):
    """Another worker went away in the middle of a collective."""


class ScriptFailed(GyrostatError):
    """The user's script raised, or a worker died."""
