"""Errors of the API: a status and one JSON object, the same form for all.

The message is for the requester: what happened, the value, what to do. Internal errors are not part of it; they are in the
daemon's log under the incident number in the message.
"""

from __future__ import annotations

import logging
import secrets

import msgspec
from starlette.responses import Response

from gyrostat.cluster.service import OutsideRoot
from gyrostat.core.errors import NoSuchJob, StorageFull, Unplaceable, UsageError, WrongState
from gyrostat.job.control.client import RequestFailed

JSON = "application/json"
logger = logging.getLogger(__name__)

MALFORMED, UNKNOWN_TOKEN, FORBIDDEN, NOT_FOUND, NOT_ALLOWED = 400, 401, 403, 404, 405
TOO_SLOW, CONFLICT, TOO_LARGE, UNSUPPORTED, MISDIRECTED, TOO_MANY, BROKEN, UNAVAILABLE = (
    408,
    409,
    413,
    415,
    421,
    429,
    500,
    503,
)

CODES = {
    MALFORMED: "malformed",
    UNKNOWN_TOKEN: "unknown_token",
    FORBIDDEN: "forbidden",
    NOT_FOUND: "not_found",
    NOT_ALLOWED: "method_not_allowed",
    TOO_SLOW: "too_slow",
    CONFLICT: "conflict",
    TOO_LARGE: "too_large",
    UNSUPPORTED: "unsupported_media_type",
    MISDIRECTED: "misdirected",
    TOO_MANY: "too_many_requests",
    BROKEN: "internal",
    UNAVAILABLE: "unavailable",
}


class ProblemBody(msgspec.Struct, frozen=True, kw_only=True):
    """Why a request was not carried out."""

    code: str
    message: str
    suggestions: tuple[str, ...] = ()
    """Existing names that are similar to the given one."""


class ApiError(Exception):
    """A request cannot be carried out; becomes a `ProblemBody`."""

    def __init__(
        self, status: int, message: str, *, code: str | None = None, suggestions: tuple[str, ...] = ()
    ) -> None:
        super().__init__(message)
        self.status = status
        self.problem = ProblemBody(code=code or CODES[status], message=message, suggestions=suggestions)

    def response(self) -> Response:
        headers = {UNKNOWN_TOKEN: {"WWW-Authenticate": "Bearer"}, TOO_MANY: {"Retry-After": "1"}}.get(
            self.status
        )
        return Response(
            msgspec.json.encode(self.problem), status_code=self.status, media_type=JSON, headers=headers
        )


_ERRORS: tuple[tuple[type[Exception], int, str], ...] = (
    (NoSuchJob, NOT_FOUND, "no_such_job"),
    (Unplaceable, MALFORMED, "unplaceable"),
    (WrongState, CONFLICT, "wrong_state"),
    (RequestFailed, CONFLICT, "not_done"),
    (StorageFull, UNAVAILABLE, "storage_full"),
    (OutsideRoot, FORBIDDEN, "forbidden"),
    (UsageError, MALFORMED, "malformed"),
)
"""Errors whose messages are for the requester. `cluster.client` maps the codes back to these types."""


def api_error(error: Exception) -> ApiError:
    """An error as the requester sees it."""
    if isinstance(error, ApiError):
        return error
    for kind, status, code in _ERRORS:
        if isinstance(error, kind):
            suggestions = error.suggestions if isinstance(error, NoSuchJob) else ()
            return ApiError(status, str(error), code=code, suggestions=suggestions)
    return broken(error)


def broken(error: Exception) -> ApiError:
    """An unexpected error: the log has the details, the response only the incident number."""
    number = secrets.token_hex(4)
    logger.error("incident %s", number, exc_info=error)
    return ApiError(BROKEN, f"internal error; see the daemon's log, incident {number}")
