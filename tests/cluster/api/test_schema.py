"""The API against its own OpenAPI document: whatever schemathesis thinks of, answers are as described, nothing fails inside,
and a tenant that tries everything learns nothing of another's job.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, settings

from gyrostat.cluster.api.openapi import document
from gyrostat.cluster.api.operations import OPERATIONS
from tests.cluster.quiet_cluster import Guarded, Quiet

SECRET = "alices-secret-model"
schema = schemathesis.openapi.from_dict(document(OPERATIONS))


@schema.hook
def map_query(context: schemathesis.HookContext, query: dict[str, Any] | None) -> dict[str, Any] | None:
    """Nobody waits for news here."""
    if query and "wait" in query:
        with contextlib.suppress(TypeError, ValueError):
            query["wait"] = 0 if 0 <= float(query["wait"]) <= 60 else query["wait"]
    return query


@pytest.fixture
def two_tenants(guarded: Guarded) -> Guarded:
    """Mallory has a job of her own, alice one that is none of her business."""
    for tenant, name in (("alice", SECRET), ("mallory", "mine")):
        with guarded.cluster(tenant) as cluster:
            cluster.submit(guarded.spec(tenant, name=name, env={"OWNER": name}))
    return guarded


@schema.parametrize()
@settings(
    max_examples=10,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
def test_answers_are_as_described(case: schemathesis.Case[Any], two_tenants: Guarded, quiet: Quiet) -> None:
    before = quiet.service.job("j1", None)
    for who in ("mallory", "operator"):
        response = case.call_and_validate(
            base_url=two_tenants.server.url,
            # What is well-formed may still be refused: a type of device that is not there, say.
            excluded_checks=[schemathesis.checks.positive_data_acceptance],
            headers={"Authorization": f"Bearer {two_tenants.secrets[who]}"},
        )
        if who == "mallory":
            assert SECRET not in response.text
            assert quiet.service.job("j1", None) == before
