"""What every request must pass before anybody reads it: is it meant for this service, and does it come from a program?

Without tokens the only protection is that the service is reached from this machine alone. A browser on this machine can be
made to send requests by any page it shows, so those are refused: a page that has its own name resolve to 127.0.0.1 is betrayed
by the Host header, any other by Origin or Sec-Fetch-Site, and bodies must be declared as JSON, which no form can do.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from gyrostat.cluster.api.problem import FORBIDDEN, MISDIRECTED, UNKNOWN_TOKEN, ApiError
from gyrostat.cluster.api.tokens import Principal, TokenBook

_log = logging.getLogger("gyrostat.api")
_LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")
_STRANGER = Principal(tenant="", vcs=())


def check_origin(headers: Mapping[str, str], hosts: Collection[str] | None) -> None:
    """Refuse what another page made a browser send. `hosts`: names under which we are known; None: any."""
    host = headers.get("host", "")
    name, colon, port = host.rpartition(":")
    if not colon or not port.isdigit():
        name = host
    if hosts is not None and name.lower() not in hosts:
        raise ApiError(MISDIRECTED, f"the request is for the host {name!r}, which this service is not")
    origin, site = headers.get("origin"), headers.get("sec-fetch-site")
    if origin is not None and origin.partition("://")[2] != host:
        raise ApiError(FORBIDDEN, "requests that a page of another origin makes are refused")
    if site is not None and site not in ("same-origin", "none"):
        raise ApiError(FORBIDDEN, "requests that a page of another origin makes are refused")


class Guard:
    """Stands before the whole service. With a token book, it also says whose request it is."""

    def __init__(
        self, app: ASGIApp, *, book: TokenBook | None, nobody: Principal, public: Collection[str]
    ) -> None:
        """`nobody` is who asks if there are no tokens; `public` paths need none."""
        self._app = app
        self._book = book
        self._nobody = nobody
        self._public = public

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            try:
                check_origin(headers, _LOOPBACK_NAMES if self._book is None else None)
                scope.setdefault("state", {})["principal"] = self._principal(scope["path"], headers)
            except ApiError as refusal:
                client = scope.get("client") or ("?",)
                method, path = scope["method"][:16], scope["path"][:128]
                _log.warning("refused %s %r from %s: %s", method, path, client[0], refusal)
                await refusal.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _principal(self, path: str, headers: Headers) -> Principal:
        if self._book is None:
            return self._nobody
        if path in self._public:
            return _STRANGER
        kind, _, secret = headers.get("authorization", "").partition(" ")
        if kind.lower() != "bearer" or not secret:
            raise ApiError(
                UNKNOWN_TOKEN, "this cluster wants a token: Authorization: Bearer TOKEN, or $GYROSTAT_TOKEN"
            )
        found = self._book.recognise(secret.strip())
        if found is None:
            raise ApiError(UNKNOWN_TOKEN, "this token is not known here, or was revoked")
        return found
