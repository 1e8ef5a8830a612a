"""A request is carried out once, and answered as often as it is sent."""

from __future__ import annotations

from dataclasses import dataclass, field

from gyrostat.job.control.replies import IdempotentReplies
from gyrostat.job.control.requests import Reply, RequestResult

DONE = RequestResult(True, "done")


@dataclass
class Requester:
    replies: list[Reply] = field(default_factory=list)

    def answer(self, reply: Reply) -> None:
        self.replies.append(reply)


def test_the_same_request_is_carried_out_once() -> None:
    replies, first, second, late = IdempotentReplies(), Requester(), Requester(), Requester()
    assert replies.is_new("r", first)
    assert not replies.is_new("r", second)
    replies.answer("r", DONE)
    assert not replies.is_new("r", late)
    assert first.replies == second.replies == late.replies == [DONE]


def test_busy_is_not_remembered() -> None:
    replies, requester = IdempotentReplies(), Requester()
    assert replies.is_new("r", requester)
    replies.answer("r", RequestResult(False, "busy with another change; retry", retryable=True))
    assert replies.is_new("r", requester)
    assert replies.answered == {}


def test_the_next_leader_knows_what_was_answered_and_what_is_under_way() -> None:
    before = IdempotentReplies()
    before.note("old", DONE)
    replies, requester = IdempotentReplies(), Requester()
    replies.restore(before.answered)
    assert not replies.is_new("old", requester)
    replies.under_way("current")
    assert not replies.is_new("current", requester)
    replies.answer("current", RequestResult(False, "no"))
    assert requester.replies == [DONE, RequestResult(False, "no")]


def test_nobody_is_left_waiting() -> None:
    replies, requester = IdempotentReplies(), Requester()
    replies.is_new("r", requester)
    replies.close("the job has ended")
    assert requester.replies == [RequestResult(False, "the job has ended")]


def test_it_does_not_remember_for_ever() -> None:
    replies = IdempotentReplies()
    for number in range(2000):
        replies.note(f"r{number}", DONE)
    assert len(replies.answered) < 2000
    assert "r1999" in replies.answered
    assert "r0" not in replies.answered


def test_it_does_not_remember_more_than_a_record_can_hold() -> None:
    replies = IdempotentReplies()
    for number in range(4):
        replies.note(f"r{number}", RequestResult(False, "x" * 100_000))
    assert list(replies.answered) == ["r2", "r3"]
