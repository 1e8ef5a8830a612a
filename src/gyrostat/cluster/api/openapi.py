"""The OpenAPI document, generated from the table of operations and the types that they decode and encode."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

import gyrostat
from gyrostat.cluster.api.operation import Operation
from gyrostat.cluster.api.problem import (
    CONFLICT,
    FORBIDDEN,
    JSON,
    MALFORMED,
    NOT_FOUND,
    TOO_LARGE,
    TOO_MANY,
    UNKNOWN_TOKEN,
    UNSUPPORTED,
    ProblemBody,
)

_REF = "#/components/schemas/{name}"
_DESCRIPTION = """\
Submit, observe and control the jobs of a cluster. A loopback address needs no token; on others every request carries one:
`Authorization: Bearer TOKEN`. A tenant's token sees that tenant's jobs only: for it, those of others do not exist.
"""
_PROBLEMS = {
    MALFORMED: "The request is invalid for this operation, or cannot be granted",
    UNKNOWN_TOKEN: "No token, or an unknown one",
    FORBIDDEN: "This token may not do that",
    NOT_FOUND: "It does not exist, or belongs to another tenant",
    CONFLICT: "Not possible in its current state",
    TOO_LARGE: "Larger than the limit",
    TOO_MANY: "As many requests of this tenant as may be are in progress",
    UNSUPPORTED: f"The body is not {JSON}",
}


def document(operations: Sequence[Operation]) -> dict[str, Any]:
    """The API in OpenAPI 3.1."""
    types: list[Any] = [ProblemBody]
    for operation in operations:
        types += [
            operation.query,
            operation.body,
            operation.answers if operation.media_type == JSON else None,
        ]
    schemas, components = msgspec.json.schema_components(
        [kind for kind in types if kind is not None], ref_template=_REF
    )
    schema_of = iter(schemas)
    problem = {JSON: {"schema": next(schema_of)}}
    paths: dict[str, dict[str, Any]] = {}
    for operation in operations:
        query = components[next(schema_of)["$ref"].rpartition("/")[2]]
        body = None if operation.body is None else next(schema_of)
        answer = next(schema_of) if operation.media_type == JSON else {"type": "string"}
        described: dict[str, Any] = {
            "operationId": operation.name,
            "summary": operation.summary,
            "parameters": [*_path_parameters(operation), *_query_parameters(query)],
            "responses": {
                str(operation.status): {
                    "description": "Done",
                    "content": {operation.media_type: {"schema": answer}},
                }
            }
            | {
                str(status): {"description": _PROBLEMS[status], "content": problem}
                for status in _refusals(operation)
            }
            | {"default": {"description": "Any other error", "content": problem}},
            "security": [{}] if operation.public else [{"token": []}, {}],
        }
        if body is not None:
            described["requestBody"] = {"required": True, "content": {JSON: {"schema": body}}}
        paths.setdefault(operation.path, {})[operation.method.lower()] = described
    used = {operation.query.__name__ for operation in operations}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "gyrostat",
            "version": gyrostat.__version__,
            "description": _DESCRIPTION,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "paths": paths,
        "components": {
            "schemas": {name: schema for name, schema in components.items() if name not in used},
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _refusals(operation: Operation) -> list[int]:
    statuses = [MALFORMED, TOO_MANY]
    if not operation.public:
        statuses.append(UNKNOWN_TOKEN)
        statuses.append(FORBIDDEN)
    if operation.about_a_job or "{" in operation.path:
        statuses.append(NOT_FOUND)
    if operation.conflicts:
        statuses.append(CONFLICT)
    if operation.body is not None:
        statuses += [TOO_LARGE, UNSUPPORTED]
    return statuses


def _path_parameters(operation: Operation) -> list[dict[str, Any]]:
    if not operation.about_a_job:
        return []
    return [
        {
            "name": "job",
            "in": "path",
            "required": True,
            "description": "Its id, or its name: the newest job of that name",
            "schema": {"type": "string", "pattern": "^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"},
        }
    ]


def _query_parameters(query: dict[str, Any]) -> list[dict[str, Any]]:
    required = query.get("required", ())
    parameters = []
    for name, schema in query["properties"].items():
        about = {key: value for key, value in schema.items() if key != "description"}
        parameter = {"name": name, "in": "query", "required": name in required, "schema": about}
        if "description" in schema:
            parameter["description"] = schema["description"]
        parameters.append(parameter)
    return parameters
