"""One operation of the API: its request and response types, and how a request becomes a call of its function.

    Operation(method, path, takes: structs for query and body, answers: a type, run: function of a `Call`)

Decoding is strict: unknown members, duplicate parameters and other content types are refused with position and reason.
Functions run in a thread, because the service may wait for a disk; those that wait for new data are called again until there
is some (`Operation.waits`), and hold no thread meanwhile; they end when their client has gone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
from anyio import CapacityLimiter, to_thread
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from gyrostat.cluster.api.admission import Admission, RequestKind
from gyrostat.cluster.api.problem import (
    FORBIDDEN,
    JSON,
    MALFORMED,
    NOT_FOUND,
    TOO_LARGE,
    TOO_SLOW,
    UNSUPPORTED,
    ApiError,
    api_error,
)
from gyrostat.cluster.api.tokens import Principal

if TYPE_CHECKING:
    from gyrostat.cluster.service import ClusterService

MAX_BODY = 1 << 20
MAX_QUERY = 4096
_BODY_SECONDS = 10.0
_LOOK_EVERY_S = 0.1
logger = logging.getLogger(__name__)


class NoBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An operation without query or body."""


@dataclass(frozen=True)
class Call:
    """A decoded request of a known principal."""

    service: ClusterService
    principal: Principal
    job: str
    """The id or name of the job in the path; empty if the operation is not about a job."""
    query: Any
    body: Any


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One row of the table in `operations`."""

    name: str
    method: str
    path: str
    summary: str
    run: Callable[[Call], Any]
    answers: Any
    query: type[msgspec.Struct] = NoBody
    body: type[msgspec.Struct] | None = None
    status: int = 200
    media_type: str = JSON
    public: bool = False
    """Needs no token."""
    operator: bool = False
    """Only for operators."""
    waits: Callable[[Call, Any], bool] | None = None
    """Whether a response has no new data: the function is called again until it has, for up to `query.wait` seconds."""
    slow: bool = False
    """It waits for a job, in one of a few threads of the operation."""
    conflicts: bool = False
    """It may be refused because of the state of the job."""

    @property
    def about_a_job(self) -> bool:
        return "{job}" in self.path


@dataclass(frozen=True)
class OperationEndpoint:
    """An operation as an endpoint of Starlette."""

    operation: Operation
    service: ClusterService
    count: Callable[[str, int], None]
    """Counts a request by operation and status."""
    admission: Admission
    patient: CapacityLimiter
    """The number of threads that may wait at once, if it is slow."""

    async def __call__(self, request: Request) -> Response:
        try:
            with self.admission.request(request.state.principal):
                response = await self._answer(request)
        except Exception as error:
            refusal, principal = api_error(error), request.state.principal
            logger.warning(
                "refused %s %r of %s: %s",
                request.method,
                request.url.path[:128],
                principal.tenant or "unknown",
                refusal,
            )
            response = refusal.response()
        self.count(self.operation.name, response.status_code)
        return response

    async def _answer(self, request: Request) -> Response:
        operation = self.operation
        principal: Principal = request.state.principal
        if operation.operator and not principal.operator:
            raise ApiError(FORBIDDEN, f"{operation.name} is for operators; this token belongs to a tenant")
        call = Call(
            service=self.service,
            principal=principal,
            job=_job(request),
            query=_read_query(request, operation.query),
            body=None if operation.body is None else await _read_body(request, operation.body),
        )
        answer = await self._run(call, request)
        if isinstance(answer, Response):
            return answer
        content = answer if isinstance(answer, bytes) else msgspec.json.encode(answer)
        return Response(content, status_code=operation.status, media_type=operation.media_type)

    async def _run(self, call: Call, request: Request) -> Any:
        operation, threads = self.operation, self.admission.threads(call.principal)
        if operation.slow:
            with self.admission.request(call.principal, RequestKind.SLOW):
                return await to_thread.run_sync(operation.run, call, limiter=self.patient)
        answer = await to_thread.run_sync(operation.run, call, limiter=threads)
        if operation.waits is None or not call.query.wait or not operation.waits(call, answer):
            return answer
        loop = asyncio.get_running_loop()
        until = loop.time() + call.query.wait
        with self.admission.request(call.principal, RequestKind.WAITING):
            while operation.waits(call, answer) and loop.time() < until:
                await asyncio.sleep(_LOOK_EVERY_S)
                if await request.is_disconnected():  # nobody waits for the answer
                    break
                answer = await to_thread.run_sync(operation.run, call, limiter=threads)
        return answer


def _job(request: Request) -> str:
    """Refuse what cannot be an id or a name."""
    job: str = request.path_params.get("job", "")
    if "job" in request.path_params and not (0 < len(job) <= 128 and job.isprintable()):
        raise ApiError(NOT_FOUND, f"there is no job {job[:128]!r}")
    return job


def _read_query(request: Request, kind: type[msgspec.Struct]) -> Any:
    raw = request.scope["query_string"]
    if len(raw) > MAX_QUERY:
        raise ApiError(TOO_LARGE, f"a query may have {MAX_QUERY} bytes, got {len(raw)}")
    pairs = request.query_params.multi_items()
    given = dict(pairs)
    if len(given) != len(pairs):
        raise ApiError(MALFORMED, "a query parameter is given more than once")
    known = {field.encode_name for field in msgspec.structs.fields(kind)}
    for name in given:
        if name not in known:
            wanted = f"known are {', '.join(sorted(known))}" if known else "this operation has none"
            raise ApiError(MALFORMED, f"unknown parameter {name[:64]!r} in the query; {wanted}")
    try:
        return msgspec.convert(given, kind, strict=False)
    except msgspec.ValidationError as error:
        raise ApiError(MALFORMED, f"the query is invalid for this operation: {error}") from error


async def _read_body(request: Request, kind: type[msgspec.Struct]) -> Any:
    declared = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if declared != JSON:
        raise ApiError(UNSUPPORTED, f"the body must be declared as {JSON}, got {declared[:64]!r}")
    try:
        async with asyncio.timeout(_BODY_SECONDS):
            content = await _whole_body(request)
    except TimeoutError:
        raise ApiError(TOO_SLOW, f"the body did not arrive within {_BODY_SECONDS:g} s") from None
    except ClientDisconnect:
        raise ApiError(MALFORMED, "the request ended before its body did") from None
    try:
        return msgspec.json.decode(content, type=kind)
    except msgspec.ValidationError as error:
        raise ApiError(MALFORMED, f"the body is invalid for this operation: {error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(MALFORMED, f"the body is not JSON: {error}") from error


async def _whole_body(request: Request) -> bytes:
    announced = request.headers.get("content-length", "0").lstrip("0")
    if len(announced) > len(str(MAX_BODY)) or (announced.isdecimal() and int(announced) > MAX_BODY):
        raise ApiError(TOO_LARGE, f"a body may have {MAX_BODY} bytes, this one announces {announced[:32]}")
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > MAX_BODY:
            raise ApiError(TOO_LARGE, f"a body may have {MAX_BODY} bytes; this one has more")
        parts.append(part)
    return b"".join(parts)
