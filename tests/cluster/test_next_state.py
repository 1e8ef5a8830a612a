"""What becomes of a job that has ended, decided purely."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from gyrostat.cluster.attempt import AttemptResult
from gyrostat.cluster.job_spec import JobSpec
from gyrostat.cluster.next_state import NextState, next_state_of
from gyrostat.cluster.records import NEXT, Intent, JobRecord, JobState
from gyrostat.core.errors import WrongState


def job(**fields: Any) -> JobRecord:
    retries = fields.pop("allowed", 0)
    spec = JobSpec(script="train.py", retries=retries)
    known = {"state": JobState.RUNNING, "reason": "fair share 2 of 4", **fields}
    return JobRecord(id="j1", number=1, name="train", tenant="me", vc="default", spec=spec, **known)


def result(**fields: Any) -> AttemptResult:
    known = {
        "attempt": 1,
        "finished": False,
        "stopped": False,
        "exit_code": 1,
        "reason": "worker 0 raised E",
        "step": 7,
    }
    return AttemptResult(**{**known, "started": True, **fields})


FAILED = result(last_lines=("so long",))
WORDS = {"exit_code": 1, "failure": "worker 0 raised E", "failed_at": 7, "last_lines": ("so long",)}


def test_one_that_finished_has_finished_whatever_was_wanted() -> None:
    end = result(finished=True, exit_code=0, reason="finished after step 7", digest="d", loss=0.5)
    fields = {"step": 7, "loss": 0.5, "exit_code": 0, "digest": "d"}
    wanted = NextState(JobState.FINISHED, "finished after step 7", "finished", True, fields=fields)
    for intent in Intent:
        assert next_state_of(job(intent=intent), end, entitled=True, verdict="too late") == wanted


@pytest.mark.parametrize(
    ("intent", "state", "kind"),
    [(Intent.CANCEL, JobState.CANCELLED, "cancelled"), (Intent.PAUSE, JobState.PAUSED, "paused")],
)
def test_its_owner_decides(intent: Intent, state: JobState, kind: str) -> None:
    for end in (result(stopped=True), FAILED, None):
        found = next_state_of(job(intent=intent), end, entitled=False)
        assert (found.state, found.kind, found.leaves) == (state, kind, True)


def test_one_that_was_preempted_waits_for_the_reason_for_which_it_was() -> None:
    stopped = result(stopped=True, exit_code=143)
    preempted = job(reason="needed by a serving load")
    assert next_state_of(preempted, stopped, entitled=False) == NextState(
        JobState.SUSPENDED, "needed by a serving load", None, False
    )
    assert next_state_of(preempted, stopped, entitled=True).state is JobState.STARTING


def test_back_off_doubles_up_to_five_minutes() -> None:
    states = [
        next_state_of(job(allowed=12, retries=n, failed_at=n), FAILED, entitled=True) for n in range(11)
    ]
    assert [next_state.after for next_state in states] == [1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300]
    assert states[1] == NextState(
        JobState.QUEUED,
        "worker 0 raised E; retry 2 of 12 in 2 s",
        "retried",
        True,
        2.0,
        {**WORDS, "retries": 2},
    )


@pytest.mark.parametrize(
    ("record", "end", "reason"),
    [
        (job(), FAILED, "worker 0 raised E"),
        (job(allowed=2, retries=2), FAILED, "worker 0 raised E; it has been tried again 2 times"),
        (
            job(allowed=9, retries=1, failure="worker 0 raised E", failed_at=7),
            FAILED,
            "worker 0 raised E; the same error after the same step as before, so it is not tried again",
        ),
        (
            job(allowed=9),
            result(retriable=False, last_lines=("so long",)),
            "worker 0 raised E; it would fail in the same way again",
        ),
    ],
)
def test_failures_that_are_final(record: JobRecord, end: AttemptResult, reason: str) -> None:
    assert next_state_of(record, end, entitled=True) == NextState(
        JobState.FAILED, reason, "failed", True, fields=WORDS
    )


def test_a_killed_host_is_replaced_until_it_helps_no_more() -> None:
    assert next_state_of(job(), None, entitled=True, deaths=3).state is JobState.STARTING
    assert next_state_of(job(), None, entitled=False, deaths=3).state is JobState.SUSPENDED
    reasons = [
        next_state_of(job(), None, entitled=entitled, deaths=1, checkpoint=step).reason
        for entitled, step in ((True, None), (True, 20), (False, 20))
    ]
    assert reasons == [
        "its host was killed; it restarts from the beginning: it has no checkpoint",
        "its host was killed; it restarts from its checkpoint of step 20",
        "its host was killed; it will restart from its checkpoint of step 20",
    ]
    last = next_state_of(job(), None, entitled=True, deaths=4)
    assert (last.state, last.fields) == (JobState.FAILED, {"exit_code": 137})


def test_a_host_that_the_cluster_killed_is_no_failure_of_the_job() -> None:
    late = "it has not left devices 0 within 30 s: it is killed"
    for entitled, state, restarts in (
        (True, JobState.STARTING, "restarts"),
        (False, JobState.SUSPENDED, "will restart"),
    ):
        reason = f"{late}; it {restarts} from its checkpoint of step 7"
        after = next_state_of(job(), None, entitled=entitled, evicted=late, checkpoint=7)
        assert after == NextState(state, reason, "restarted", False)


def test_states_follow_one_another_as_drawn() -> None:
    for before in JobState:
        for after in JobState:
            record = job(state=before, changed=10.0)
            if after is before or after in NEXT[before]:
                moved = record.moved(after, "why", 12.0)
                assert (moved.state, moved.ran) == (after, 2.0 if record.holds_devices else 0.0)
            else:
                with pytest.raises(WrongState, match=f"is {before}; it cannot become {after}"):
                    record.moved(after, "why", 12.0)


def test_records_survive_json() -> None:
    record = job(allowed=3, devices=(0, 2), loss=0.5)
    assert msgspec.json.decode(msgspec.json.encode(record), type=JobRecord) == record


def test_one_that_could_not_be_started_waits_a_while_and_has_not_failed() -> None:
    next_state = next_state_of(job(), result(postponed=True, reason="no space left on device"), entitled=True)
    assert next_state == NextState(
        JobState.QUEUED, "no space left on device; tried again in 30 s", "postponed", True, after=30.0
    )
