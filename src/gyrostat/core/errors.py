"""The tree of errors. A message says what happened, the value, and what to do about it.

GyrostatError
├── UsageError                 bad input: nothing was done; exit code 2
│   ├── Refused                a model or option that cannot be exact, found at `track`
│   ├── Misuse                 a call of the API in an invalid order
│   ├── NotYet                 a capability that this version does not have
│   ├── NoSuchJob              no job of that name or id exists, or it belongs to another tenant
│   ├── Unplaceable            a job that a cluster can never run, refused when it is submitted
│   ├── WrongState             a request that the job's present state does not allow
│   ├── OutsideRoot            a job outside the directory of its tenant (in `cluster.service`)
│   └── StoreUnusable          a lease store that cannot be opened: wrong address, no server, wrong credentials
├── ClusterUnreachable         no cluster exists, or it does not respond
├── StorageFull                a cluster's disk is full; nothing was accepted; retry when there is space
├── RequestFailed              a running job could not carry out a request (in `job.control.client`)
├── RecordRefused              the record of a leader cannot be kept as it is (in `job.control.executor`)
├── Unavailable                an agent did not answer (in `job.nodes.service`)
├── CheckpointError            a checkpoint that cannot be used
│   ├── DamagedCheckpoint      cut off or bit-flipped
│   ├── ForeignCheckpoint      of another job; exit code 2
│   └── OtherFingerprint       of this job, but other hardware or settings decide its bits; exit code 2
├── MalformedState             bytes from disk or another worker that are not a valid state
├── Diverged                   replicas that must be equal are not
├── LeaseError                 an operation of a lease store failed
│   ├── StoreUnreachable       no response; the operation may have been done; retry
│   ├── StoreRefused           the store responded with an error; retry after the store has been repaired
│   │   └── ValueTooLarge      the value is too large for any store; do not retry
│   └── Deposed                a write or renewal under an expired lease; nothing was written; do not retry
├── ProtocolError              a message that does not belong to the protocol (in `job.processes.channel`)
├── MalformedFrame             bytes that are not a frame of parameter servers (in `ps.wire.frames`); costs the connection only
├── LeaderLost                 the leader of a job with servers has ended (in `ps.client.remote`)
├── PeerLost                   another worker was lost during a collective
└── ScriptFailed               the user's script raised, or one of its workers died
"""

from __future__ import annotations


class GyrostatError(Exception):
    """The base of all errors that gyrostat raises. `exit_code` is the exit code of the command line."""

    exit_code = 1


class UsageError(GyrostatError):
    """Invalid input. Nothing has been done."""

    exit_code = 2


class Refused(UsageError):
    """A model, optimizer or option that cannot give the bits of plain DDP."""


class Misuse(UsageError):
    """A call that is invalid at this point."""


class NotYet(UsageError):
    """A capability that this version does not have."""


class NoSuchJob(UsageError):
    """The cluster has no such job, or it belongs to another tenant; the message does not distinguish the two."""

    def __init__(self, message: str, suggestions: tuple[str, ...] = ()) -> None:
        """`suggestions`: existing names that are similar, the most similar first."""
        super().__init__(message)
        self.suggestions = suggestions


class Unplaceable(UsageError):
    """A job that this cluster can never run."""


class WrongState(UsageError):
    """A request that the job's present state does not allow."""


class ClusterUnreachable(GyrostatError):
    """No cluster exists, or it does not respond; the last request may have been carried out."""


class StorageFull(GyrostatError):
    """The cluster's disk is full. Nothing was accepted; retry when there is space."""


class StoreUnusable(UsageError):
    """A lease store that cannot be opened."""


class CheckpointError(GyrostatError):
    """A checkpoint that cannot be used."""


class DamagedCheckpoint(CheckpointError):
    """Cut off, altered or unreadable."""


class ForeignCheckpoint(CheckpointError):
    """Written by another job."""

    exit_code = 2


class OtherFingerprint(CheckpointError):
    """Written where other hardware or settings decide the bits."""

    exit_code = 2


class MalformedState(GyrostatError):
    """Bytes or a skeleton that are not a valid state. Nothing has been restored."""


class LeaseError(GyrostatError):
    """An operation of a lease store failed."""


class StoreUnreachable(LeaseError):
    """No response from a lease store. The operation may have been done; a retry may help."""


class StoreRefused(LeaseError):
    """A lease store responded with an error."""


class ValueTooLarge(StoreRefused):
    """A value that no lease store accepts. Nothing was written, and a retry cannot help."""


class Deposed(LeaseError):
    """A write or renewal under an expired lease. Nothing was written, and a retry cannot help."""


class Diverged(GyrostatError):
    """Replicas that must be equal are not."""


class PeerLost(GyrostatError):
    """Another worker was lost during a collective."""


class ScriptFailed(GyrostatError):
    """The user's script raised, or a worker died."""
