"""The API as one ASGI application: routes of the table of operations, behind the guard."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec
from anyio import CapacityLimiter
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from gyrostat.cluster.api.admission import Admission
from gyrostat.cluster.api.guard import Guard
from gyrostat.cluster.api.metrics import Metrics
from gyrostat.cluster.api.openapi import document
from gyrostat.cluster.api.operation import NoBody, Operation, OperationEndpoint
from gyrostat.cluster.api.operations import API, OPERATIONS
from gyrostat.cluster.api.problem import NOT_ALLOWED, NOT_FOUND, ApiError, broken
from gyrostat.cluster.api.tokens import Principal, TokenFile

if TYPE_CHECKING:
    from gyrostat.cluster.service import ClusterService

_PATIENT_THREADS = 8
"""Per slow operation: long profiles do not keep others from reserving devices."""


class Resource:
    """One path and its methods."""

    def __init__(self, endpoints: Mapping[str, OperationEndpoint]) -> None:
        self._endpoints = endpoints

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        endpoint = self._endpoints.get(request.method)
        if endpoint is None:
            response = ApiError(NOT_ALLOWED, f"{request.method[:16]!r} is not allowed here").response()
            response.headers["Allow"] = ", ".join(self._endpoints)
        else:
            response = await endpoint(request)
        await response(scope, receive, send)


def build_app(service: ClusterService, *, token_file: TokenFile | None, anonymous: Principal) -> ASGIApp:
    """`anonymous`: the principal of all requests if there are no tokens."""
    metrics, admission = Metrics(service), Admission()
    described = [*OPERATIONS, _metrics(metrics)]
    operations = [*described, _openapi(described)]
    paths: dict[str, dict[str, OperationEndpoint]] = {}
    for operation in operations:
        endpoint = OperationEndpoint(
            operation, service, metrics.count, admission, CapacityLimiter(_PATIENT_THREADS)
        )
        paths.setdefault(operation.path, {})[operation.method] = endpoint
    app = Starlette(
        routes=[Route(path, Resource(endpoints)) for path, endpoints in paths.items()],
        exception_handlers={HTTPException: _no_such_path, Exception: _broken},
    )
    app.router.redirect_slashes = False
    public = {operation.path for operation in operations if operation.public}
    return Guard(app, token_file=token_file, anonymous=anonymous, public=public)


def _metrics(metrics: Metrics) -> Operation:
    return Operation(
        name="metrics",
        method="GET",
        path="/metrics",
        summary="Jobs, devices and requests, for Prometheus",
        run=lambda call: metrics.text(),
        answers=NoBody,
        media_type=metrics.media_type,
        operator=True,
    )


def _openapi(described: list[Operation]) -> Operation:
    content = msgspec.json.encode(document(described))
    return Operation(
        name="openapi",
        method="GET",
        path=f"/{API}/openapi.json",
        summary="This document",
        run=lambda call: content,
        answers=NoBody,
        public=True,
    )


def _no_such_path(request: Request, error: Exception) -> Response:
    return ApiError(
        NOT_FOUND, f"there is nothing at {request.url.path[:128]!r}; see /{API}/openapi.json"
    ).response()


def _broken(request: Request, error: Exception) -> Response:
    return broken(error).response()
