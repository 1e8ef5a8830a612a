"""Two tenants, one of them hostile: refused, logged, nothing leaked."""

from __future__ import annotations

import http.client
import json
import logging
import os
import socket
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from gyrostat.cluster.api.messages import Use
from gyrostat.cluster.api.operation import MAX_BODY
from gyrostat.cluster.api.tokens import read_tokens, write_tokens
from gyrostat.cluster.client import ClusterClient
from gyrostat.cluster.records import JobState, LogSource
from gyrostat.core.errors import NoSuchJob, UsageError
from tests.cluster.quiet_cluster import Guarded, Quiet

SECRET = "alices-secret-model"


@pytest.fixture
def alice(guarded: Guarded) -> Iterator[ClusterClient]:
    with guarded.cluster("alice") as client:
        client.submit(guarded.spec("alice", name=SECRET, env={"PASSWORD": "sesame"}))
        yield client


@pytest.fixture
def mallory(guarded: Guarded) -> Iterator[ClusterClient]:
    with guarded.cluster("mallory") as client:
        yield client


def connected(guarded: Guarded) -> socket.socket:
    host, _, port = guarded.server.address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=120)


def ask(
    guarded: Guarded, method: str, path: str, body: bytes | None = None, **headers: str
) -> tuple[int, dict[str, Any]]:
    """As mallory, by hand."""
    connection = http.client.HTTPConnection(guarded.server.address)
    given = {"Authorization": f"Bearer {guarded.secrets['mallory']}", "Content-Type": "application/json"}
    connection.request(
        method, path, body, given | {name.replace("_", "-"): text for name, text in headers.items()}
    )
    response = connection.getresponse()
    content = response.read()
    connection.close()
    return response.status, json.loads(content)


TOUCHES: tuple[Callable[[ClusterClient, str], object], ...] = (
    ClusterClient.status,
    ClusterClient.cancel,
    ClusterClient.pause,
    ClusterClient.resume,
    ClusterClient.migrate,
    ClusterClient.profile,
    lambda cluster, job: cluster.scale(job, 1, 1),
    lambda cluster, job: list(cluster.logs(job)),
)


def test_another_tenants_job_does_not_exist(
    alice: ClusterClient, mallory: ClusterClient, quiet: Quiet, caplog: pytest.LogCaptureFixture
) -> None:
    before = quiet.service.job("j1", None)
    for touch in TOUCHES:
        for job in ("j1", SECRET):
            caplog.clear()
            with (
                caplog.at_level(logging.WARNING, "gyrostat.cluster.api"),
                pytest.raises(NoSuchJob) as refused,
            ):
                touch(mallory, job)
            with pytest.raises(NoSuchJob) as unknown:
                touch(mallory, "x" * len(job))
            assert str(refused.value).replace(job, "") == str(unknown.value).replace("x" * len(job), "")
            assert f"tenant mallory asked for another tenant's job '{job}'" in caplog.text
    assert quiet.service.job("j1", None) == before
    assert quiet.machine.asked == []


def test_near_names_of_others_are_not_suggested(alice: ClusterClient, mallory: ClusterClient) -> None:
    with pytest.raises(NoSuchJob) as error:
        mallory.status(SECRET[:-1])
    assert "did you mean" not in str(error.value)


def test_what_a_tenant_sees_of_the_cluster(
    alice: ClusterClient, mallory: ClusterClient, guarded: Guarded, quiet: Quiet
) -> None:
    quiet.registry.move("j1", JobState.STARTING, "its turn", "started", devices=(0,))
    quiet.machine.holders[0] = ("j1", "alice")
    mallory.submit(guarded.spec("mallory", name="mine"))
    quiet.machine.why = "waits for j1 to leave, and j2 is behind nobody"
    found = mallory.overview()
    assert [job.name for job in found.jobs] == ["mine"]
    assert next((device.use, device.job, device.tenant) for device in found.devices) == (Use.BUSY, None, None)
    assert [waiting.why for waiting in found.waiting] == [
        "waits for another job to leave, and j2 is behind nobody"
    ]
    assert mallory.status("mine").waiting == found.waiting[0]
    assert [event.job for event in mallory.events()] == ["j2"]
    assert [job.name for job in mallory.jobs()] == ["mine"]
    assert mallory.jobs(tenant="alice") == ()
    with guarded.cluster("operator") as operator:
        assert [job.name for job in operator.jobs()] == [SECRET, "mine"]
        assert [event.job for event in operator.events()] == ["j1", "j1", "j2"]
        assert operator.devices()[0].job == "j1"
        assert operator.cancel(SECRET).id == "j1"


def test_a_connection_without_a_request_is_closed(guarded: Guarded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gyrostat.cluster.api.connections.REQUEST_S", 0.05)
    with connected(guarded) as connection:
        connection.sendall(b"GET /v1 HTTP/1.1\r\nHost: x\r\nX-Drip: ")
        assert connection.recv(1) == b""


def test_a_connection_that_is_idle_after_a_request_is_closed(
    guarded: Guarded, monkeypatch: pytest.MonkeyPatch
) -> None:
    with connected(guarded) as connection:
        connection.sendall(b"GET /v1 HTTP/1.1\r\nHost: x\r\n\r\n")
        response = http.client.HTTPResponse(connection)
        response.begin()
        assert (response.status, b"version" in response.read()) == (200, True)
        monkeypatch.setattr("gyrostat.cluster.api.connections.REQUEST_S", 0.05)
        connection.sendall(b"G")
        assert connection.recv(1) == b""


def test_what_strangers_ask_for_fills_no_log(guarded: Guarded, caplog: pytest.LogCaptureFixture) -> None:
    connection = http.client.HTTPConnection(guarded.server.address)
    with caplog.at_level(logging.WARNING, "gyrostat.cluster.api"):
        connection.request("GET", "/v1/" + "x" * 5000)
        assert connection.getresponse().status == 401
    connection.close()
    assert "x" * 100 in caplog.text
    assert len(caplog.text) < 500


def test_near_names_are_suggested(alice: ClusterClient, guarded: Guarded, mallory: ClusterClient) -> None:
    mallory.submit(guarded.spec("mallory", name="resnet"))
    status, problem = ask(guarded, "GET", "/v1/jobs/resnets")
    assert (status, problem["suggestions"]) == (404, ["resnet"])


def test_a_tenant_is_led_past_what_happens_to_others(alice: ClusterClient, guarded: Guarded) -> None:
    status, events = ask(guarded, "GET", "/v1/events?since=0&wait=30")
    assert (status, events["events"], events["next"]) == (200, [], 1)


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "/metrics", None),
        ("GET", "/v1/recording", None),
        ("GET", "/v1/reservations", None),
        ("POST", "/v1/reservations", b'{"type": "cpu", "devices": 1}'),
        ("POST", "/v1/shutdown", b"{}"),
    ],
)
def test_what_is_for_operators(
    guarded: Guarded, quiet: Quiet, method: str, path: str, body: bytes | None
) -> None:
    status, problem = ask(guarded, method, path, body)
    assert (status, problem["code"]) == (403, "forbidden")
    assert quiet.machine.asked == []


def test_path_tricks_in_names(guarded: Guarded, mallory: ClusterClient, quiet: Quiet) -> None:
    for name in ("../../etc", "a/b", "..", ".hidden", "a\0b", "a\nb", "", "x" * 65, "ünï", "-rf", "%2e%2e"):
        with pytest.raises(UsageError, match="a job's name is made of"):
            mallory.submit(guarded.spec("mallory", name=name))
    assert quiet.service.jobs(None) == []


TRICKS: tuple[tuple[dict[str, Any], int], ...] = (
    ({"workdir": "{alice}"}, 403),
    ({"workdir": "/"}, 403),
    ({"workdir": "{mallory}/../alice"}, 400),
    ({"workdir": "{mallory}/.."}, 400),
    ({"workdir": "relative"}, 400),
    ({"workdir": "{mallory}\0"}, 400),
    ({"workdir": "{mallory}/link"}, 403),
    ({"script": "../alice/train.py"}, 403),
    ({"script": "{alice}/train.py"}, 403),
    ({"script": "link/train.py"}, 403),
    ({"script": "train.py\0"}, 400),
    ({"script": "/etc/passwd"}, 403),
    ({"script": "timeit", "module": True, "args": ["-s", "import os"]}, 403),
    ({"vc": "alice"}, 403),
    ({"vc": "../alice"}, 403),
    ({"env": {"A=B": "c"}}, 400),
    ({"env": {"GYROSTAT_RUNTIME_DIR": "/tmp"}}, 400),
)


def test_path_tricks_in_jobs(guarded: Guarded, quiet: Quiet, caplog: pytest.LogCaptureFixture) -> None:
    os.symlink(guarded.root("alice"), guarded.root("mallory") / "link")
    places = {who: str(guarded.root(who)) for who in ("alice", "mallory")}
    for fields, status in TRICKS:
        spec = {"script": "train.py", "workdir": "{mallory}"} | fields
        body = {
            name: value.format(**places) if isinstance(value, str) else value for name, value in spec.items()
        }
        caplog.clear()
        with caplog.at_level(logging.WARNING, "gyrostat.cluster.api"):
            found = ask(guarded, "POST", "/v1/jobs", json.dumps(body).encode())[0]
        assert (fields, found) == (fields, status)
        assert "refused POST '/v1/jobs' of mallory" in caplog.text
    assert quiet.service.jobs(None) == []


def test_modules_are_for_tokens_that_may_run_them(guarded: Guarded, quiet: Quiet) -> None:
    body = json.dumps({"script": "timeit", "module": True, "workdir": str(guarded.root("mallory"))}).encode()
    status, problem = ask(guarded, "POST", "/v1/jobs", body)
    assert (status, problem["code"]) == (403, "forbidden")
    assert "this token may not run modules" in problem["message"]
    may = [
        msgspec.structs.replace(
            token,
            principal=msgspec.structs.replace(token.principal, modules=token.principal.tenant == "mallory"),
        )
        for token in read_tokens(guarded.tokens)
    ]
    write_tokens(guarded.tokens, tuple(may))
    assert ask(guarded, "POST", "/v1/jobs", body)[0] == 201
    assert quiet.service.job("j1", None).beneath == ((str(guarded.root("mallory")),),)


ADDRESSES = (
    *(
        "..%2f..%2fetc%2fpasswd",
        "%2e%2e",
        "....",
        "j1%00",
        "j1%0a",
        "j1'--",
        "%ff%fe",
        "x" * 4000,
        "j1%2flogs",
        "%20",
    ),
)


def test_path_tricks_in_addresses(alice: ClusterClient, guarded: Guarded) -> None:
    for job in ADDRESSES:
        for path in (f"/v1/jobs/{job}", f"/v1/jobs/{job}/logs"):
            status, problem = ask(guarded, "GET", path)
            assert (path, status, SECRET in str(problem)) == (path, 404, False)


def test_a_place_in_a_log_is_no_way_into_another(
    alice: ClusterClient, guarded: Guarded, quiet: Quiet
) -> None:
    with guarded.cluster("mallory") as mallory:
        mallory.submit(guarded.spec("mallory", name="mine"))
    for job, text in (("j1", "alice's line"), ("j2", "mine")):
        output = quiet.files.log(job, LogSource.OUTPUT)
        output.parent.mkdir(parents=True)
        output.write_text(f"{text}\n")
    inode = quiet.files.log("j1", LogSource.OUTPUT).stat().st_ino
    status, part = ask(guarded, "GET", f"/v1/jobs/mine/logs?after={inode}:0:0")
    assert (status, part["lines"]) == (200, ["mine"])


BODIES = (
    (b"", 400),
    (b"{", 400),
    (b"[]", 400),
    (b"null", 400),
    (b"\xff\xfe", 400),
    (b'{"script": "train.py", "unknown": 1}', 400),
    (b'{"script": 5}', 400),
    (b'{"script": "train.py", "min": 1e400}', 400),
    (b'{"script": "train.py", "min": -1}', 400),
    (b'{"script": "train.py", "virtual_workers": 99999999999999999999999}', 400),
    (b'{"script": "train.py", "time_limit": 1e300}', 400),
    (b'{"script": "train.py", "time_limit": 1e11}', 400),
    (b'{"script": "train.py", "virtual_workers": 1000000000}', 400),
    (b'{"script": "train.py", "checkpoint_every": 1' + b"0" * 30 + b"}", 400),
    (b'{"script": "train.py", "args": "x"}', 400),
    (b"[" * 100_000, 400),
    (b'{"script": "' + b"x" * 5000 + b'"}', 400),
    (b'{"script": "' + b"x" * MAX_BODY + b'"}', 413),
)


def test_malformed_and_oversize_bodies(guarded: Guarded, quiet: Quiet) -> None:
    for body, status in BODIES:
        found, problem = ask(guarded, "POST", "/v1/jobs", body)
        assert (body[:50], found) == (body[:50], status)
        assert set(problem) == {"code", "message", "suggestions"}
        assert "Traceback" not in problem["message"]
        assert len(problem["message"]) < 1000
    assert quiet.service.jobs(None) == []


def test_a_body_that_never_says_how_long_it_is(guarded: Guarded) -> None:
    head = (
        f"POST /v1/jobs HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {guarded.secrets['mallory']}\r\n"
        "Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    chunk = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
    host, _, port = guarded.server.address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=120) as connection:
        connection.sendall(head.encode())
        try:
            for _ in range(2 + MAX_BODY // 0x10000):
                connection.sendall(chunk)
        except ConnectionError:
            pass
        assert connection.recv(64).startswith(b"HTTP/1.1 413 ")


QUERIES = (
    *(
        "tail=x",
        "tail=-1",
        "wait=1e9",
        "wait=nan",
        "source=../../etc/passwd",
        "after=x",
        "a=b",
        "tail=1&tail=2",
    ),
    "x" * 5000,
)


def test_malformed_queries(guarded: Guarded, mallory: ClusterClient) -> None:
    mallory.submit(guarded.spec("mallory", name="mine"))
    for query in QUERIES:
        status, problem = ask(guarded, "GET", f"/v1/jobs/mine/logs?{query}")
        assert (query, status in (400, 413)) == (query, True)
        assert problem["message"]


def test_without_a_token_nothing_is_disclosed(alice: ClusterClient, guarded: Guarded) -> None:
    connection = http.client.HTTPConnection(guarded.server.address)
    for header in (None, "", "Bearer", "Bearer ", "Bearer wrong", "Basic bWFsbG9yeTp4", "Bearer \xff\xfe"):
        for path in ("/v1/jobs", "/v1/jobs/j1", "/v1/overview", "/metrics", "/v1/nosuch"):
            connection.request("GET", path, headers={} if header is None else {"Authorization": header})
            response = connection.getresponse()
            assert SECRET not in response.read().decode()
            assert (response.status, response.headers["WWW-Authenticate"]) == (401, "Bearer")
    for path in ("/v1", "/v1/openapi.json"):
        connection.request("GET", path)
        response = connection.getresponse()
        assert (response.status, SECRET in response.read().decode()) == (200, False)
    connection.close()


def test_a_revoked_token_is_refused_at_once(mallory: ClusterClient, guarded: Guarded) -> None:
    assert mallory.jobs() == ()
    kept = [token for token in read_tokens(guarded.tokens) if token.principal.tenant != "mallory"]
    write_tokens(guarded.tokens, tuple(kept))
    with pytest.raises(UsageError, match="unknown or was revoked"):
        mallory.jobs()


def test_a_name_is_never_taken_for_anothers_id(alice: ClusterClient, guarded: Guarded) -> None:
    """Or a tenant could have an operator cancel its neighbour's job."""
    with guarded.cluster("mallory") as mallory, guarded.cluster("operator") as operator:
        mallory.submit(guarded.spec("mallory", name="j1"))
        assert operator.status("j1").job.tenant == "alice"
        assert mallory.status("j1").job.tenant == "mallory"
