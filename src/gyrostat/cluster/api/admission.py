"""How many requests of each tenant are in progress, so that none takes the API away from others. One event loop only.

A request beyond a limit is refused at once (429); none of them queues. Tenants have limits of their own and one for all of
them together, which leaves connections for operators; operators also have threads of their own. Connections on which no
request is in progress are limited in `connections`.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from enum import StrEnum

from anyio import CapacityLimiter

from gyrostat.cluster.api.problem import TOO_MANY, ApiError
from gyrostat.cluster.api.tokens import Principal


class RequestKind(StrEnum):
    ANY = "requests"
    WAITING = "requests that wait for new data"
    SLOW = "requests that wait for a job"


LIMITS = {RequestKind.ANY: 128, RequestKind.WAITING: 64, RequestKind.SLOW: 4}
"""Of one tenant, at the same time."""
OPERATORS = {RequestKind.ANY: 192, RequestKind.WAITING: 128, RequestKind.SLOW: 8}
"""Of all operators. Without tokens, everybody is one."""
ALL_TENANTS = 320
"""Requests of all tenants together."""
_THREADS, _OPERATORS_THREADS = 32, 16


class Admission:
    def __init__(self) -> None:
        self._in_progress: Counter[tuple[str | None, RequestKind]] = Counter()
        self._tenants = 0
        self._threads, self._operators_threads = (
            CapacityLimiter(_THREADS),
            CapacityLimiter(_OPERATORS_THREADS),
        )

    @contextlib.contextmanager
    def request(self, principal: Principal, kind: RequestKind = RequestKind.ANY) -> Iterator[None]:
        """Count a request during the block, or refuse it."""
        key = (None if principal.operator else principal.tenant), kind
        limit = (OPERATORS if principal.operator else LIMITS)[kind]
        if self._in_progress[key] >= limit:
            raise ApiError(
                TOO_MANY, f"you have {limit} {kind} in progress, which is the limit; try again later"
            )
        counts = kind is RequestKind.ANY and not principal.operator
        if counts and self._tenants >= ALL_TENANTS:
            raise ApiError(TOO_MANY, f"{ALL_TENANTS} {kind} of all tenants are in progress; try again later")
        self._in_progress[key] += 1
        self._tenants += counts
        try:
            yield
        finally:
            self._in_progress[key] -= 1
            self._tenants -= counts
            if not self._in_progress[key]:
                del self._in_progress[key]

    def threads(self, principal: Principal) -> CapacityLimiter:
        """In which a request of this principal runs."""
        return self._operators_threads if principal.operator else self._threads
