"""Messages and questions to the thread of the scheduling loop, and what it does with statuses."""

from __future__ import annotations

import threading

import pytest

from gyrostat.core.errors import GyrostatError
from gyrostat.local.inbox import ClusterInbox, JobChanged, Message, Reserve
from gyrostat.local.layout import layout_of_slots
from gyrostat.local.tracked import RateMeter

TIMEOUT_S = 120.0


def test_messages_keep_their_order_and_are_taken_once() -> None:
    inbox = ClusterInbox()
    messages: list[Message] = [JobChanged("j1"), Reserve({"cpu": 1}), JobChanged("j2")]
    for message in messages:
        inbox.post(message)
    inbox.wait(None)
    assert inbox.take() == messages
    assert inbox.take() == []


def test_a_question_waits_for_the_messages_before_it() -> None:
    inbox, answers = ClusterInbox(), list[int]()
    inbox.post(JobChanged("j1"))
    asking = threading.Thread(target=lambda: answers.append(inbox.ask(lambda state: len(state.fleet))))
    asking.start()
    inbox.wait(TIMEOUT_S)
    assert inbox.take_questions() == []
    assert inbox.take() == [JobChanged("j1")]
    inbox.wait(TIMEOUT_S)
    (answer,) = inbox.take_questions()
    answer(layout_of_slots("cpu:3").scheduler_state("fifo"))
    asking.join()
    assert answers == [3]


@pytest.mark.parametrize("checkpoint", [True, False])
def test_the_first_request_to_end_counts(checkpoint: bool) -> None:
    inbox = ClusterInbox()
    assert not inbox.is_closing
    inbox.shut_down(checkpoint)
    inbox.shut_down(not checkpoint)
    inbox.wait(None)
    assert (inbox.is_closing, inbox.checkpoints) == (True, checkpoint)
    with pytest.raises(GyrostatError, match="being shut down"):
        inbox.ask(lambda state: None)


def test_a_rate_is_reported_every_few_seconds_and_starts_anew() -> None:
    rate = RateMeter()
    assert [rate.update(step, now) for step, now in ((10, 0.0), (20, 4.0), (30, 5.0))] == [None, None, 4.0]
    assert rate.update(30, 11.0) is None, "it stands still"
    assert rate.update(42, 11.0) == 2.0
    assert rate.update(5, 12.0) is None, "it has restarted from a checkpoint"
    rate.reset()
    assert rate.update(50, 20.0) is None
    assert rate.update(60, 25.0) == 2.0
