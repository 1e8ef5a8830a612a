"""What other threads send to the thread of the scheduling loop: messages, questions, and the request to end."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from gyrostat.core.errors import GyrostatError
from gyrostat.local.driver_messages import DriverMessage
from gyrostat.sched.state import SchedulerState

T = TypeVar("T")
Question: TypeAlias = Callable[[SchedulerState], None]
_ANSWER_S = 30.0
_LONGEST_WAIT_S = 3600.0
"""The loop looks again at least this often; a timer of the operating system has a limit, a policy's or job's time has none."""


@dataclass(frozen=True)
class JobChanged:
    """A job is new, or its owner has requested something: see the registry."""

    job: str


@dataclass(frozen=True)
class Reserve:
    """Serving loads have these devices from now on, by type."""

    devices: Mapping[str, int]


Message: TypeAlias = JobChanged | Reserve | DriverMessage


class ClusterInbox:
    """All but `take`, `take_questions` and `wait` may be called from any thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._messages: deque[Message] = deque()
        self._questions: deque[Question] = deque()
        self._shutdown: bool | None = None

    def post(self, message: Message) -> None:
        with self._changed:
            self._messages.append(message)
            self._changed.notify_all()

    def ask(self, question: Callable[[SchedulerState], T]) -> T:
        """Have the loop's thread read the scheduler's state, between two scheduling rounds."""
        answer: Future[T] = Future()

        def reply(state: SchedulerState) -> None:
            try:
                answer.set_result(question(state))
            except BaseException as error:
                answer.set_exception(error)

        with self._changed:
            if self.is_closing:
                raise GyrostatError("the cluster is being shut down")
            self._questions.append(reply)
            self._changed.notify_all()
        return answer.result(timeout=_ANSWER_S)

    def shut_down(self, checkpoint: bool) -> None:
        """Request the end of the loop. Only the first request counts."""
        with self._changed:
            if self._shutdown is None:
                self._shutdown = checkpoint
            self._changed.notify_all()

    @property
    def is_closing(self) -> bool:
        return self._shutdown is not None

    @property
    def checkpoints(self) -> bool:
        """Whether jobs stop with the daemon."""
        return bool(self._shutdown)

    # For the loop's thread.

    def take(self) -> list[Message]:
        """All messages, in the order in which they were posted."""
        with self._changed:
            messages = list(self._messages)
            self._messages.clear()
            return messages

    def take_questions(self) -> list[Question]:
        """All questions, unless there are messages: an answer reflects all messages that were posted before the question."""
        with self._changed:
            if self._messages:
                return []
            questions = list(self._questions)
            self._questions.clear()
            return questions

    def wait(self, seconds: float | None) -> None:
        """Until there is a message or question, the end is requested, or `seconds` or an hour have passed."""
        with self._changed:
            self._changed.wait_for(
                lambda: bool(self._messages or self._questions or self.is_closing),
                _LONGEST_WAIT_S if seconds is None else min(_LONGEST_WAIT_S, seconds),
            )

    def wait_for_messages(self, seconds: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: bool(self._messages), seconds)
