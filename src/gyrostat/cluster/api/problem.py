"""How the API says no: a status and one JSON object, the same for all refusals.

The message is for the person who asked: what, the value, what to do. What went wrong inside is never part of it; that goes to
the daemon's log under the number that the message names.
"""

from __future__ import annotations

import logging
import secrets

import msgspec
from starlette.responses import Response

from gyrostat.cluster.service import OutsideRoot
from gyrostat.core.errors import NoSuchJob, StorageFull, Unplaceable, UsageError, WrongState
from gyrostat.job.control.control_socket import RequestFailed

JSON = "application/json"
_log = logging.getLogger("gyrostat.api")

MALFORMED, UNKNOWN_TOKEN, FORBIDDEN, NOT_FOUND, NOT_ALLOWED = 400, 401, 403, 404, 405
TOO_SLOW, CONFLICT, TOO_LARGE, UNSUPPORTED, MISDIRECTED, BROKEN, UNAVAILABLE = (
    408,
    409,
    413,
    415,
    421,
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
    BROKEN: "internal",
    UNAVAILABLE: "unavailable",
}


class ProblemBody(msgspec.Struct, frozen=True, kw_only=True):
    """Why a request was not carried out."""

    code: str
    message: str
    suggestions: tuple[str, ...] = ()
    """Names that exist and are near the one that was given."""


class ApiError(Exception):
    """Raised wherever a request cannot be carried out; becomes a `ProblemBody`."""

    def __init__(
        self, status: int, message: str, *, code: str | None = None, suggestions: tuple[str, ...] = ()
    ) -> None:
        super().__init__(message)
        self.status = status
        self.problem = ProblemBody(code=code or CODES[status], message=message, suggestions=suggestions)

    def response(self) -> Response:
        headers = {"WWW-Authenticate": "Bearer"} if self.status == UNKNOWN_TOKEN else None
        return Response(
            msgspec.json.encode(self.problem), status_code=self.status, media_type=JSON, headers=headers
        )


_TOLD: tuple[tuple[type[Exception], int, str], ...] = (
    (NoSuchJob, NOT_FOUND, "no_such_job"),
    (Unplaceable, MALFORMED, "unplaceable"),
    (WrongState, CONFLICT, "wrong_state"),
    (RequestFailed, CONFLICT, "not_done"),
    (StorageFull, UNAVAILABLE, "storage_full"),
    (OutsideRoot, FORBIDDEN, "forbidden"),
    (UsageError, MALFORMED, "malformed"),
)
"""Errors whose messages are meant for whoever asked. `local.client` turns the codes back into them."""


def told(error: Exception) -> ApiError:
    """An error as it is told to whoever asked."""
    if isinstance(error, ApiError):
        return error
    for kind, status, code in _TOLD:
        if isinstance(error, kind):
            suggestions = error.suggestions if isinstance(error, NoSuchJob) else ()
            return ApiError(status, str(error), code=code, suggestions=suggestions)
    return broken(error)


def broken(error: Exception) -> ApiError:
    """For what nobody foresaw: the log says what, the answer only where to look."""
    number = secrets.token_hex(4)
    _log.error("incident %s", number, exc_info=error)
    return ApiError(
        BROKEN, f"something went wrong inside; the daemon's log says what, under incident {number}"
    )
