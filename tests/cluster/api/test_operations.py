"""Every operation of the API, through the client and on a real socket, against a cluster that runs nothing."""

from __future__ import annotations

import http.client
import json
import logging
import threading

import msgspec
import pytest

from gyrostat.cluster.api.messages import Use
from gyrostat.cluster.api.server import ApiServer
from gyrostat.cluster.client import ClusterClient
from gyrostat.cluster.records import Intent, JobState, LogSource
from gyrostat.core.errors import ClusterUnreachable, NoSuchJob, Unplaceable, UsageError, WrongState
from tests.cluster.quiet_cluster import ROWS, Quiet


def test_submit(cluster: ClusterClient, quiet: Quiet) -> None:
    spec = quiet.spec(virtual_workers=4, args=("--epochs", "3"), env={"A": "b"}, time_limit=60.0)
    job = cluster.submit(spec)
    assert (job.id, job.name, job.state, job.spec) == ("j1", "train", JobState.QUEUED, spec)
    assert quiet.registry.store.jobs() == [job]


@pytest.mark.parametrize(
    ("fields", "kind", "message"),
    [
        ({"virtual_workers": 8, "min": 5}, Unplaceable, "needs at least 5 devices, and there are 4"),
        ({"min": 2}, UsageError, "1 <= min <= max <= virtual workers must hold"),
        ({"script": "other.py"}, UsageError, "there is no script 'other.py'"),
        ({"workdir": "/nowhere"}, UsageError, "there is no directory /nowhere"),
        ({"vc": "defualt"}, UsageError, "did you mean 'default'"),
    ],
)
def test_what_is_refused_at_submission(
    cluster: ClusterClient, quiet: Quiet, fields: dict[str, object], kind: type[Exception], message: str
) -> None:
    with pytest.raises(UsageError, match=message) as refused:
        cluster.submit(quiet.spec(**fields))
    assert type(refused.value) is kind
    assert quiet.registry.store.jobs() == []


def test_jobs(cluster: ClusterClient, quiet: Quiet) -> None:
    jobs = [cluster.submit(quiet.spec(name=name)) for name in ("a", "b", "c")]
    quiet.registry.move("j2", JobState.CANCELLED, "its owner cancels it")
    assert [job.id for job in cluster.jobs()] == ["j1", "j2", "j3"]
    assert [job.id for job in cluster.jobs(ended=False)] == ["j1", "j3"]
    assert [job.id for job in cluster.jobs(state=JobState.CANCELLED)] == ["j2"]
    assert cluster.jobs(tenant="nobody") == ()
    assert cluster.jobs(tenant=jobs[0].tenant, ended=False) == (jobs[0], jobs[2])


def test_status_says_why_a_job_waits(cluster: ClusterClient, quiet: Quiet) -> None:
    job = cluster.submit(quiet.spec())
    found = cluster.status("train")
    assert found.job == job
    assert found.waiting is not None
    assert (found.waiting.position, found.waiting.why) == (1, "all 4 devices are busy")
    quiet.registry.move("j1", JobState.STARTING, "its turn", devices=(0,))
    assert cluster.status("j1").waiting is None


def test_near_names_are_suggested(cluster: ClusterClient, quiet: Quiet) -> None:
    cluster.submit(quiet.spec(name="resnet"))
    with pytest.raises(NoSuchJob, match="there is no job 'resnt'; did you mean 'resnet'"):
        cluster.status("resnt")


def test_owners_steer_their_jobs(cluster: ClusterClient, quiet: Quiet) -> None:
    cluster.submit(quiet.spec(virtual_workers=4))
    assert cluster.pause("train").intent is Intent.PAUSE
    assert cluster.resume("train").intent is Intent.RUN
    scaled = cluster.scale("train", 2, 3).spec
    assert (scaled.min, scaled.max) == (2, 3)
    with pytest.raises(UsageError, match="must hold"):
        cluster.scale("train", 2, 5)
    assert cluster.cancel("train").intent is Intent.CANCEL
    with pytest.raises(WrongState, match="job j1 is being cancelled"):
        cluster.pause("train")


def test_running_jobs_are_asked(cluster: ClusterClient, quiet: Quiet) -> None:
    cluster.submit(quiet.spec())
    changed = cluster.migrate("train", (0, 2))
    assert (changed.text, changed.step, changed.workers) == ("moved", 7, 2)
    assert cluster.profile("train", 1, 2, 5).rows == ROWS
    assert quiet.machine.asked == [("migrate", "j1", (0, 2)), ("profile", "j1", 1, 2, 5)]
    with pytest.raises(WrongState, match="only a running one can be measured"):
        cluster.profile("train", largest=9)


def test_devices_and_overview(cluster: ClusterClient, quiet: Quiet) -> None:
    tenant = cluster.submit(quiet.spec()).tenant
    cluster.submit(quiet.spec(name="late"))
    quiet.registry.move("j1", JobState.STARTING, "its turn", devices=(1,))
    quiet.machine.holders[1] = ("j1", tenant)
    devices = cluster.devices()
    assert [(device.use, device.job) for device in devices] == [
        (Use.FREE, None),
        (Use.BUSY, "j1"),
        (Use.FREE, None),
        (Use.FREE, None),
    ]
    found = cluster.overview()
    assert found.devices == devices
    assert [job.id for job in found.jobs] == ["j1", "j2"]
    assert [waiting.job for waiting in found.waiting] == ["j2"]
    assert found.virtual_clusters == ("default",)


def test_events(cluster: ClusterClient, quiet: Quiet) -> None:
    for name in ("a", "b", "c"):
        cluster.submit(quiet.spec(name=name))
    assert [(event.number, event.kind, event.job) for event in cluster.events()] == [
        (1, "submitted", "j1"),
        (2, "submitted", "j2"),
        (3, "submitted", "j3"),
    ]
    assert [event.number for event in cluster.events(2)] == [3]


def test_a_client_that_follows_events_gets_them_at_once(
    cluster: ClusterClient, server: ApiServer, quiet: Quiet
) -> None:
    cluster.submit(quiet.spec(name="a"))
    following = cluster.events(follow=True)
    assert next(following).job == "j1"
    later = threading.Thread(target=lambda: quiet.service.submit(quiet.spec(name="b"), "me"))
    later.start()
    assert next(following).job == "j2"
    later.join()


def test_logs(cluster: ClusterClient, quiet: Quiet) -> None:
    cluster.submit(quiet.spec())
    assert list(cluster.logs("train")) == []
    output = quiet.files.log("j1", LogSource.OUTPUT)
    output.parent.mkdir(parents=True)
    output.write_text("[0] one\n[1] two\n")
    quiet.files.log("j1", LogSource.METRICS).write_text('{"step":1,"metrics":{"loss":0.5}}\n')
    assert list(cluster.logs("train")) == ["[0] one", "[1] two"]
    assert list(cluster.logs("train", tail=1)) == ["[1] two"]
    assert list(cluster.logs("train", source=LogSource.METRICS)) == ['{"step":1,"metrics":{"loss":0.5}}']


def test_following_a_log_ends_with_the_job(cluster: ClusterClient, quiet: Quiet) -> None:
    cluster.submit(quiet.spec())
    output = quiet.files.log("j1", LogSource.OUTPUT)
    output.parent.mkdir(parents=True)
    output.write_text("[0] one\n")
    lines = cluster.logs("train", follow=True)
    assert next(lines) == "[0] one"

    def end() -> None:
        with output.open("a") as file:
            file.write("[0] two\n[0] no newline")
        quiet.registry.move("j1", JobState.CANCELLED, "its owner cancels it")

    ending = threading.Thread(target=end)
    ending.start()
    assert list(lines) == ["[0] two", "[0] no newline"]
    ending.join()


def test_waiting_for_a_job_returns_how_it_ended(cluster: ClusterClient, quiet: Quiet) -> None:
    cluster.submit(quiet.spec())
    ending = threading.Thread(
        target=lambda: quiet.registry.move("j1", JobState.CANCELLED, "its owner cancels it", "cancelled")
    )
    ending.start()
    assert cluster.wait("train").state is JobState.CANCELLED
    ending.join()


def test_devices_are_reserved_and_released(cluster: ClusterClient, quiet: Quiet) -> None:
    found = cluster.reserve("cpu", 2, wait=5)
    assert (found.devices, found.free) == ({"cpu": 2}, True)
    quiet.machine.holders[0] = ("j1", "me")
    assert not cluster.reservations().free
    assert cluster.reserve("cpu", 0).devices == {}
    assert quiet.machine.asked == [("reserve", {"cpu": 2}, 5.0), ("reserve", {"cpu": 0}, 0.0)]
    with pytest.raises(UsageError, match="there are no devices of type 'gpu' here; there are cpu"):
        cluster.reserve("gpu", 1)


def test_the_newest_recording_is_served(cluster: ClusterClient, quiet: Quiet) -> None:
    with pytest.raises(UsageError, match="nothing has been recorded yet"):
        cluster.recording()
    for number in (1, 2):
        (quiet.home.recordings / f"{number}.jsonl").write_text(f"{number}\n")
    assert cluster.recording() == b"2\n"


def test_the_daemon_is_asked_to_end(cluster: ClusterClient, quiet: Quiet) -> None:
    cluster.shutdown(checkpoint=False)
    assert quiet.machine.asked == [("shut down", False)]


def test_a_client_says_if_nobody_answers(server: ApiServer) -> None:
    server.stop()
    with pytest.raises(ClusterUnreachable, match="does not answer"):
        ClusterClient(server.url).jobs()


@pytest.mark.parametrize("url", ["ftp://x:1", "http://", "http://x:y", "http://x:1/path"])
def test_what_is_no_address_of_a_cluster(url: str) -> None:
    with pytest.raises(UsageError, match="a cluster's address is"):
        ClusterClient(url)


def test_metrics(cluster: ClusterClient, server: ApiServer, quiet: Quiet) -> None:
    tenant = cluster.submit(quiet.spec()).tenant
    quiet.registry.move("j1", JobState.STARTING, "its turn", devices=(1, 2))
    quiet.registry.progress("j1", step=17, loss=0.25, throughput=640.0)
    quiet.machine.holders[1] = ("j1", tenant)
    connection = http.client.HTTPConnection(server.address)
    connection.request("GET", "/metrics")
    response = connection.getresponse()
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    lines = set(response.read().decode().splitlines())
    connection.close()
    labels = f'{{job="j1",name="train",tenant="{tenant}",vc="default"}}'
    assert {
        f'gyrostat_jobs{{state="starting",tenant="{tenant}"}} 1.0',
        f'gyrostat_jobs{{state="queued",tenant="{tenant}"}} 0.0',
        f"gyrostat_job_step{labels} 17.0",
        f"gyrostat_job_loss{labels} 0.25",
        f"gyrostat_job_throughput{labels} 640.0",
        f"gyrostat_job_devices{labels} 2.0",
        'gyrostat_devices{type="cpu",use="busy"} 1.0',
        'gyrostat_devices{type="cpu",use="free"} 3.0',
        "gyrostat_trouble 0.0",
        'gyrostat_api_requests_total{operation="submit",status="201"} 1.0',
    } <= lines


def test_an_unexpected_error_is_logged_and_not_disclosed(
    cluster: ClusterClient, quiet: Quiet, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise RuntimeError("open sesame")

    monkeypatch.setattr(quiet.service, "devices", fail)
    with (
        caplog.at_level(logging.ERROR, "gyrostat.cluster.api"),
        pytest.raises(Exception, match="daemon's log, incident") as error,
    ):
        cluster.devices()
    assert "sesame" not in str(error.value)
    number = str(error.value).rpartition(" ")[2]
    assert f"incident {number}" in caplog.text
    assert "open sesame" in caplog.text


def test_the_document_describes_what_is_served(server: ApiServer) -> None:
    connection = http.client.HTTPConnection(server.address)
    connection.request("GET", "/v1/openapi.json")
    document = json.loads(connection.getresponse().read())
    connection.close()
    assert document["openapi"] == "3.1.0"
    operations = {
        operation["operationId"] for path in document["paths"].values() for operation in path.values()
    }
    assert operations == {
        *("about", "submit", "jobs", "status", "logs", "cancel", "pause", "resume", "scale", "migrate"),
        *("profile", "devices", "events", "overview", "reservations", "reserve", "recording", "shutdown"),
        "metrics",
    }
    spec = document["components"]["schemas"]["JobSpec"]
    from gyrostat.cluster.job_spec import JobSpec

    assert set(spec["properties"]) == {field.name for field in msgspec.structs.fields(JobSpec)}
    assert spec["additionalProperties"] is False
