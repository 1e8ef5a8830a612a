"""What every request must pass first: it is meant for this service, and was not sent by a web page.

Without tokens the only protection is that the service listens on this machine's loopback address. Any web page can make a
browser on this machine send requests; these are refused: DNS rebinding shows in the Host header, other pages in Origin or
Sec-Fetch-Site, and bodies must be declared as JSON, which no form can do.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from gyrostat.cluster.api.problem import FORBIDDEN, MISDIRECTED, UNKNOWN_TOKEN, ApiError
from gyrostat.cluster.api.tokens import Principal, TokenFile

logger = logging.getLogger(__name__)
_LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")
_UNKNOWN = Principal(tenant="", vcs=())


def check_origin(headers: Mapping[str, str], hosts: Collection[str] | None) -> None:
    """Refuse requests of other origins. `hosts`: the allowed host names; None: any."""
    host = headers.get("host", "")
    name, colon, port = host.rpartition(":")
    if not colon or not port.isdigit():
        name = host
    if hosts is not None and name.lower() not in hosts:
        raise ApiError(MISDIRECTED, f"the request is for the host {name!r}, not for this service")
    origin, site = headers.get("origin"), headers.get("sec-fetch-site")
    if origin is not None and origin.partition("://")[2] != host:
        raise ApiError(FORBIDDEN, "requests from another origin are refused")
    if site is not None and site not in ("same-origin", "none"):
        raise ApiError(FORBIDDEN, "requests from another origin are refused")


class Guard:
    """Wraps the whole service. With tokens, it also determines the principal of a request."""

    def __init__(
        self, app: ASGIApp, *, token_file: TokenFile | None, anonymous: Principal, public: Collection[str]
    ) -> None:
        """`anonymous`: the principal of all requests if there are no tokens; `public` paths need none."""
        self._app = app
        self._tokens = token_file
        self._anonymous = anonymous
        self._public = public

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            try:
                check_origin(headers, _LOOPBACK_NAMES if self._tokens is None else None)
                scope.setdefault("state", {})["principal"] = self._principal(scope["path"], headers)
            except ApiError as refusal:
                client = scope.get("client") or ("?",)
                method, path = scope["method"][:16], scope["path"][:128]
                logger.warning("refused %s %r from %s: %s", method, path, client[0], refusal)
                await refusal.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _principal(self, path: str, headers: Headers) -> Principal:
        if self._tokens is None:
            return self._anonymous
        if path in self._public:
            return _UNKNOWN
        kind, _, secret = headers.get("authorization", "").partition(" ")
        if kind.lower() != "bearer" or not secret:
            raise ApiError(
                UNKNOWN_TOKEN,
                "this cluster requires a token: Authorization: Bearer TOKEN, or $GYROSTAT_TOKEN",
            )
        found = self._tokens.recognise(secret.strip())
        if found is None:
            raise ApiError(UNKNOWN_TOKEN, "this token is unknown or was revoked")
        return found
