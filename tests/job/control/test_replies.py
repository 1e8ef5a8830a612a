"""Who is answered what, and how often."""

from __future__ import annotations

from dataclasses import dataclass, field

from gyrostat.job.control.control_socket import Reply, RequestResult
from gyrostat.job.control.replies import IdempotentReplies

DONE = RequestResult(True, "done")


@dataclass
class Asker:
    replies: list[Reply] = field(default_factory=list)

    def answer(self, reply: Reply) -> None:
        self.replies.append(reply)


def test_the_same_request_is_carried_out_once() -> None:
    reception, first, second, late = IdempotentReplies(), Asker(), Asker(), Asker()
    assert reception.is_new("r", first)
    assert not reception.is_new("r", second)
    reception.answer("r", DONE)
    assert not reception.is_new("r", late)
    assert first.replies == second.replies == late.replies == [DONE]


def test_busy_is_not_remembered() -> None:
    reception, asker = IdempotentReplies(), Asker()
    assert reception.is_new("r", asker)
    reception.answer("r", RequestResult(False, "busy with another change; retry", retryable=True))
    assert reception.is_new("r", asker)
    assert reception.answered == {}


def test_the_next_leader_knows_what_was_answered_and_what_is_under_way() -> None:
    before = IdempotentReplies()
    before.note("old", DONE)
    reception, asker = IdempotentReplies(before.answered), Asker()
    assert not reception.is_new("old", asker)
    reception.under_way("current")
    assert not reception.is_new("current", asker)
    reception.answer("current", RequestResult(False, "no"))
    assert asker.replies == [DONE, RequestResult(False, "no")]


def test_nobody_is_left_waiting() -> None:
    reception, asker = IdempotentReplies(), Asker()
    reception.is_new("r", asker)
    reception.close("the job has ended")
    assert asker.replies == [RequestResult(False, "the job has ended")]


def test_it_does_not_remember_for_ever() -> None:
    reception = IdempotentReplies()
    for number in range(2000):
        reception.note(f"r{number}", DONE)
    assert len(reception.answered) < 2000
    assert "r1999" in reception.answered
    assert "r0" not in reception.answered
