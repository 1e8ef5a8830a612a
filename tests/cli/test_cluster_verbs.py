"""The verbs that speak to a cluster, over a real socket to one that runs nothing."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gyrostat.cli.cluster_options import complete_job
from gyrostat.cli.main import build_app
from gyrostat.cluster.api.server import serving
from gyrostat.cluster.records import Intent, JobState, LogSource
from gyrostat.core.errors import ClusterUnreachable, NoSuchJob, UsageError
from gyrostat.core.phase import JobPhase, ReconfigurationPhase
from gyrostat.job.control.control_socket import ControlSocket
from gyrostat.job.control.requests import Status
from tests.cluster.quiet_cluster import Quiet, quiet_cluster


@pytest.fixture
def quiet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Quiet]:
    """A cluster that this process finds as its own."""
    monkeypatch.delenv("GYROSTAT_CLUSTER", raising=False)
    monkeypatch.delenv("GYROSTAT_TOKEN", raising=False)
    with quiet_cluster(tmp_path) as found, serving(found.service, "127.0.0.1:0") as server:
        monkeypatch.setenv("GYROSTAT_STATE_DIR", str(found.home.path))
        monkeypatch.setenv("GYROSTAT_RUNTIME_DIR", str(tmp_path / "run"))
        monkeypatch.setenv("COLUMNS", "200")
        monkeypatch.chdir(found.workdir)
        found.home.announce(server.url)
        yield found


def invoke(*args: str, code: int = 0) -> str:
    result = CliRunner().invoke(build_app(), args, catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result.output


def parsed(*args: str) -> Any:
    return json.loads(invoke(*args, "--json"))


def test_submit_with_all_options(quiet: Quiet) -> None:
    job = json.loads(
        invoke(
            *("submit", "--json", "--name", "mnist", "--virtual-workers", "8", "--min", "2", "--max", "4"),
            *("--types", "cpu,gpu", "--cpu", "1.5", "--memory", "2G", "--priority", "7", "--vc", "default"),
            *("--opportunistic", "--retries", "3", "--time-limit", "1.5h", "--env", "A=b=c", "--env", "HOME"),
            *("--workdir", str(quiet.workdir), "--checkpoint-every", "100", "--steps", "1000"),
            *("--checkpoint-interval", "60", "--keep", "2", "--recovery", "checkpoint", "--restarts", "1"),
            *("--poison-limit", "5", "--heartbeat-timeout", "9", "--grace", "4", "--watchdog", "120"),
            *("--watchdog-action", "end", "--stragglers", "re-place", "--straggler-factor", "1.5"),
            *("--straggler-steps", "7", "--straggler-pause", "8"),
            *("--workload", "resnet", "--mix-types", "--threads", "2", "--reduction", "tree"),
            *("--determinism", "elastic", "train.py", "--name", "its own", "-n", "3"),
        )
    )
    assert job["spec"] == {
        "script": "train.py",
        "args": ["--name", "its own", "-n", "3"],
        "module": False,
        "name": "mnist",
        "virtual_workers": 8,
        "min": 2,
        "max": 4,
        "types": ["cpu", "gpu"],
        "mix_types": True,
        "cpu": 1.5,
        "memory": 2 << 30,
        "priority": 7,
        "vc": "default",
        "opportunistic": True,
        "retries": 3,
        "time_limit": 5400.0,
        "env": {"A": "b=c", "HOME": os.environ["HOME"]},
        "workdir": str(quiet.workdir),
        "threads": 2,
        "reduction": "tree",
        "determinism": "elastic",
        "checkpoint_every": 100,
        "checkpoint_interval": 60.0,
        "keep": 2,
        "recovery": "checkpoint",
        "restarts": 1,
        "poison_limit": 5,
        "heartbeat_timeout": 9.0,
        "grace": 4.0,
        "watchdog": 120.0,
        "watchdog_action": "end",
        "stragglers": "re-place",
        "straggler_factor": 1.5,
        "straggler_steps": 7,
        "straggler_pause": 8.0,
        "steps": 1000,
        "workload": "resnet",
        "servers": 0,
        "server_cores": 1,
        "server_memory": None,
        "server_recovery": "exact",
        "server_adjust": 60.0,
    }


def test_submit_says_what_to_do_next(quiet: Quiet) -> None:
    assert invoke("submit", "train.py") == "submitted train as j1; to watch it: gyrostat logs -f j1\n"


def test_submit_a_job_file(quiet: Quiet, tmp_path: Path) -> None:
    (quiet.workdir / "job.yaml").write_text(
        "script: train.py\nargs: [--epochs, '3']\nvirtual_workers: 4\nmemory: 1G\ntime_limit: 30m\nenv: {A: b}\n"
    )
    job = json.loads(
        invoke("submit", "--json", "--at", _address(quiet), "-n", "2", str(quiet.workdir / "job.yaml"))
    )
    spec = job["spec"]
    assert (spec["virtual_workers"], spec["memory"], spec["time_limit"]) == (2, 1 << 30, 1800.0)
    assert (spec["workdir"], spec["args"], spec["env"]) == (str(quiet.workdir), ["--epochs", "3"], {"A": "b"})
    assert json.loads(invoke("submit", "--json", "job.yaml", "--other"))["spec"]["args"] == ["--other"]


def _address(quiet: Quiet) -> str:
    endpoint = quiet.home.endpoint()
    assert endpoint is not None
    return endpoint.url.removeprefix("http://")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--min", "3", "-n", "2", "train.py"), "1 <= min <= max <= virtual workers must hold"),
        (("nosuch.py",), "there is no script 'nosuch.py'"),
        (("--min", "5", "-n", "8", "train.py"), "needs at least 5 devices, and there are 4"),
        (("--memory", "much", "train.py"), "--memory is a size such as 512M or 4G; got 'much'"),
        (("--time-limit", "0", "train.py"), "--time-limit is a time above 0"),
        (("--env", "NOSUCHVARIABLE", "train.py"), "but it is not set"),
        (("--env", "A-B=c", "train.py"), "an environment variable is NAME=VALUE"),
        (("--name", "a/b", "train.py"), "a job's name is made of"),
        (("--vc", "defualt", "train.py"), "did you mean 'default'"),
        (("nosuch.yaml",), "the job file nosuch.yaml cannot be read"),
        (("empty.yaml",), "must have fields such as `script: train.py`"),
        (("noscript.yaml",), "has no script"),
        (("odd.yaml",), "Object contains unknown field `scripts`"),
        (("bad.yaml",), "is not YAML"),
    ],
)
def test_what_submit_refuses(quiet: Quiet, args: tuple[str, ...], message: str) -> None:
    for name, text in (
        ("empty", ""),
        ("noscript", "min: 1"),
        ("odd", "script: a.py\nscripts: b"),
        ("bad", "{"),
    ):
        (quiet.workdir / f"{name}.yaml").write_text(text)
    with pytest.raises(UsageError) as refused:
        invoke("submit", *args)
    assert message in str(refused.value)
    assert quiet.service.jobs(None) == []


def test_submit_and_follow_ends_as_the_job_does(quiet: Quiet, monkeypatch: pytest.MonkeyPatch) -> None:
    def submit_and_run(submit: Callable[..., Any]) -> Callable[..., Any]:
        def run(spec: Any, tenant: str, root: str | None) -> Any:
            job = submit(spec, tenant, root)
            output = quiet.files.log(job.id, LogSource.OUTPUT)
            output.parent.mkdir(parents=True)
            output.write_text("[0] hello\n")
            quiet.registry.move(job.id, JobState.FAILED, "it raised", exit_code=3)
            return job

        return run

    monkeypatch.setattr(quiet.service, "submit", submit_and_run(quiet.service.submit))
    submitted, failed = "gyrostat: submitted train as j1\n", "gyrostat: error: train (j1) failed: it raised\n"
    assert invoke("submit", "--follow", "train.py", code=3) == submitted + "[0] hello\n" + failed


def test_jobs(quiet: Quiet) -> None:
    assert invoke("jobs") == "no jobs\n"
    for name in ("first", "second"):
        invoke("submit", "--name", name, "train.py")
    quiet.registry.move("j1", JobState.CANCELLED, "its owner cancels it")
    lines = invoke("jobs").splitlines()
    assert lines[0].split() == ["job", "name", "state", "devices", "step", "age", "why"]  # nothing is empty
    assert lines[1].split()[:2] == ["j2", "second"]
    assert lines[1].rstrip().endswith(quiet.machine.why)
    assert lines[2] == "and 1 cancelled: --all shows them"
    assert [job["name"] for job in parsed("jobs")] == ["second"]
    assert [job["name"] for job in parsed("jobs", "--all")] == ["first", "second"]
    assert [job["name"] for job in parsed("jobs", "--state", "cancelled")] == ["first"]


def test_status_of_a_job_that_waits(quiet: Quiet) -> None:
    invoke("submit", "-n", "4", "train.py", "--epochs", "3")
    page = invoke("status", "train")
    assert "  runs      train.py --epochs 3\n" in page
    assert "  size      4 virtual workers on 1 to 4 devices\n" in page
    assert "  waits     number 1 in its queue: all 4 devices are busy\n" in page
    assert "  helps     one device less for others\n" in page
    assert parsed("status", "j1")["waiting"]["position"] == 1
    assert invoke("status") == "train (j1): step 0, 4 virtual workers on 0, queued\n"


def test_status_of_a_job_that_failed(quiet: Quiet) -> None:
    invoke("submit", "train.py")
    quiet.registry.move(
        "j1",
        JobState.FAILED,
        "its script raised",
        failure="ValueError: no data",
        exit_code=1,
        last_lines=("Traceback", "\x1b[2JValueError: no data"),
    )
    page = invoke("status", "train").splitlines()
    assert "  failed    ValueError: no data" in page
    assert "  exit code 1" in page
    assert page[-3:] == ["  last lines", "    Traceback", "    ·[2JValueError: no data"]


def test_unknown_names_suggest_near_ones(quiet: Quiet) -> None:
    invoke("submit", "--name", "resnet", "train.py")
    for args in (("status",), ("logs",), ("cancel",), ("pause",), ("resume",), ("migrate",), ("profile",)):
        with pytest.raises(NoSuchJob, match="there is no job 'resnt'; did you mean 'resnet'"):
            invoke(*args, "resnt")
    with pytest.raises(NoSuchJob, match="did you mean 'resnet'"):
        invoke("scale", "resnt", "2")


def test_logs(quiet: Quiet) -> None:
    invoke("submit", "train.py")
    output = quiet.files.log("j1", LogSource.OUTPUT)
    output.parent.mkdir(parents=True)
    output.write_text("[0] one\n[1] two\n")
    assert invoke("logs", "train") == "[0] one\n[1] two\n"
    assert invoke("logs", "-t", "1", "train") == "[1] two\n"
    assert parsed("logs", "-t", "1", "train") == {"line": "[1] two"}
    quiet.registry.move("j1", JobState.CANCELLED, "its owner cancels it")
    assert invoke("logs", "-f", "train") == "[0] one\n[1] two\n"


def test_steering(quiet: Quiet) -> None:
    invoke("submit", "-n", "4", "train.py")
    assert invoke("pause", "train") == "train (j1) pauses at its next boundary\n"
    assert quiet.service.job("j1", None).intent is Intent.PAUSE
    assert invoke("resume", "train") == "train (j1) is back in the queue\n"
    assert invoke("cancel", "train") == "train (j1) is being cancelled\n"
    assert parsed("cancel", "j1")["intent"] == "cancel"


@pytest.mark.parametrize(
    ("wanted", "sizes"), [("3", (3, 3)), ("2-4", (2, 4)), ("+1", (3, 3)), ("-1", (1, 1))]
)
def test_scale(quiet: Quiet, wanted: str, sizes: tuple[int, int]) -> None:
    invoke("submit", "-n", "4", "train.py")
    quiet.registry.move("j1", JobState.STARTING, "its turn", devices=(0, 1))
    invoke("scale", "train", wanted)
    spec = quiet.service.job("j1", None).spec
    assert (spec.min, spec.max) == sizes


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("0",), "to release all of them: gyrostat pause train"),
        (("-1", "--without", "0"), "the scheduler of a cluster chooses the workers"),
        (("5",), "must hold"),
        (("many",), "P is a number of workers"),
        (("3", "--at", "127.0.0.1:1", "--agent", "x:1"), "give one of them"),
    ],
)
def test_what_scale_refuses(quiet: Quiet, args: tuple[str, ...], message: str) -> None:
    invoke("submit", "-n", "4", "train.py")
    with pytest.raises(UsageError, match=message):
        invoke("scale", "train", *args)


def test_running_jobs_are_asked_through_the_cluster(quiet: Quiet) -> None:
    invoke("submit", "train.py")
    assert invoke("migrate", "train", "0", "2") == "moved (pause 2 ms, prepared in 20 ms)\n"
    assert invoke("profile", "j1", "--max", "2").splitlines()[1].split()[:2] == ["1", "64.0"]
    assert parsed("profile", "j1")[0]["throughput"] == 64.0
    assert quiet.machine.asked == [
        ("migrate", "j1", (0, 2)),
        ("profile", "j1", None, 2, 20),
        ("profile", "j1", None, None, 20),
    ]


def test_events(quiet: Quiet) -> None:
    for name in ("first", "second"):
        invoke("submit", "--name", name, "train.py")
    quiet.registry.move("j2", JobState.STARTING, "its turn", "started", devices=(0, 1))
    lines = invoke("events").splitlines()
    assert [line.split()[0] for line in lines] == ["1", "2", "3"]
    assert lines[2].endswith("started    j2     0 → 2 devices: its turn")
    assert [line.split()[3] for line in invoke("events", "--job", "second").splitlines()] == [
        "submitted",
        "started",
    ]
    assert invoke("events", "--since", "2", "--kind", "submitted") == ""
    assert parsed("events", "--since", "2")["after"] == [0, 1]


def test_reserve_and_release(quiet: Quiet) -> None:
    assert invoke("reserve") == "reserved: none\n"
    assert invoke("reserve", "cpu", "2") == "reserved: 2 cpu\n"
    assert parsed("reserve") == {"devices": {"cpu": 2}, "free": True}
    assert invoke("release") == "reserved: none\n"
    with pytest.raises(UsageError, match="give the number of devices"):
        invoke("reserve", "cpu")


def test_top(quiet: Quiet) -> None:
    for name in ("first", "second"):
        invoke("submit", "--name", name, "-n", "4", "train.py")
    tenant = quiet.service.job("j1", None).tenant
    quiet.registry.move("j1", JobState.STARTING, "its turn", devices=(1, 2))
    quiet.registry.progress("j1", step=17, loss=0.25, throughput=1640.0)
    quiet.machine.holders |= {1: ("j1", tenant), 2: ("j1", tenant)}
    quiet.machine.reserved = 1
    page = invoke("top")
    lines = [line.split() for line in page.splitlines()]
    assert "2 of 4 devices busy, 1 running, 1 waiting" in page
    assert ["cpu-0", "cpu", "serving", "j1", "j1", "·"] in lines
    assert [tenant, "2", "devices"] in lines
    assert next(line for line in lines if line[:1] == ["j1"])[:10] == [
        *("j1", "first", "starting", "2", "of", "1-4", "17", "1,640/s", "0.25", "0"),
    ]
    waiting = next(line for line in lines if line[:1] == ["j2"])
    assert waiting[:4] == ["j2", "second", "1", "0"]
    assert waiting[5:] == ["all", "4", "devices", "are", "busy", "one", "device", "less", "for", "others"]
    assert parsed("top")["jobs"][0]["step"] == 17


def test_tokens(quiet: Quiet, tmp_path: Path) -> None:
    file = tmp_path / "tokens.json"
    (tmp_path / "alice").mkdir()
    secret = invoke("token", "add", "alice", "--root", str(tmp_path / "alice"), "--file", str(file)).strip()
    assert secret.startswith("gyr_")
    invoke("token", "add", "ops", "--operator", "--file", str(file))
    assert secret not in file.read_text()
    listed = parsed("token", "list", "--file", str(file))
    assert [token["principal"]["tenant"] for token in listed] == ["alice", "ops"]
    assert "submit to alice, below" in invoke("token", "list", "--file", str(file))
    assert invoke("token", "revoke", "alice", "--file", str(file)) == "1 revoked, 1 left\n"
    for args, message in (
        (("revoke", "bob"), "there is no token of 'bob'"),
        (("add", "bob"), "give the root of bob's scripts"),
        (("add", "../bob", "--root", "/"), "a tenant's name is made of"),
        (("add", "bob", "--operator", "--root", "/"), "omit --root"),
        (("add", "bob", "--root", "/nosuch"), "there is no directory /nosuch"),
    ):
        with pytest.raises(UsageError, match=message):
            invoke("token", *args, "--file", str(file))


def test_names_are_completed(quiet: Quiet) -> None:
    invoke("submit", "--name", "resnet", "train.py")
    assert complete_job("res") == [("resnet", "queued")]
    assert complete_job("j") == [("j1", "queued")]
    asked = {"_GYROSTAT_COMPLETE": "complete_bash", "COMP_WORDS": "gyrostat logs re", "COMP_CWORD": "2"}
    assert CliRunner().invoke(build_app(), prog_name="gyrostat", env=asked).output.strip() == "resnet"
    quiet.home.withdraw()
    assert complete_job("res") == []


def test_without_a_cluster_it_is_said(quiet: Quiet) -> None:
    quiet.home.withdraw()
    with pytest.raises(ClusterUnreachable, match="no cluster runs here: start one with `gyrostat up`"):
        invoke("jobs")
    with pytest.raises(ClusterUnreachable, match="does not answer"):
        invoke("jobs", "--at", "127.0.0.1:1")
    with pytest.raises(UsageError, match="no job named 'train' is running"):
        invoke("scale", "train", "2")
    assert invoke("status") == "no job is running\n"


def test_a_cluster_that_has_gone_hides_no_job_by_itself(quiet: Quiet) -> None:
    quiet.home.announce("http://127.0.0.1:1")
    with pytest.raises(UsageError, match="no job named 'train' is running"):
        invoke("status", "train")


def test_every_verb_teaches(quiet: Quiet) -> None:
    for verb in (
        *("submit", "jobs", "status", "logs", "scale", "migrate", "profile", "cancel", "pause", "resume"),
        *("top", "events", "replay", "reserve", "release"),
    ):
        page = invoke(verb, "--help")
        assert f"gyrostat {verb}" in page
        assert "--json" in page


def test_replay_of_the_running_cluster(quiet: Quiet, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="nothing has been recorded yet"):
        invoke("replay")
    trace = tmp_path / "jobs.csv"
    trace.write_text("id,submitted,duration,devices\na,0,100,4\nb,10,50,2\nc,20,30,4\n")
    recording = quiet.home.recordings / "1.jsonl"
    invoke("simulate", "--cluster", "gpu:1x4", "--policy", "fifo", "--record", str(recording), str(trace))
    line = invoke("replay", "--save", str(tmp_path / "kept.jsonl"))
    assert line.endswith("actions: all plans equal\n")
    assert (tmp_path / "kept.jsonl").read_bytes() == recording.read_bytes()
    assert parsed("replay", str(recording))["difference"] is None
    (summary,) = parsed("replay", "--policy", "fifo")
    assert (summary["policy"], summary["makespan"], summary["all"]["jobs"]) == ("fifo", 180.0, 3)
    assert "3 jobs of the recording; 0 had not ended or never ran" in invoke("replay", "--policy", "wfs")
    recording.write_text(recording.read_text().replace('"gpu:1x4"', '"gpu:1x6"'))
    assert "s differs" in invoke("replay", code=1)


STATUS = Status(
    name="j7",
    program="train.py",
    pid=1,
    virtual_workers=4,
    workers=2,
    members=(0, 1),
    generation=1,
    phase=JobPhase.TRAINING,
    reconfiguration=ReconfigurationPhase.STEADY,
    step=7,
    loss=None,
    throughput=None,
)


@contextlib.contextmanager
def a_job_that_trains(sockets: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Its control socket is there, and says `STATUS`."""
    with monkeypatch.context() as patch, selectors.DefaultSelector() as selector:
        patch.setenv("GYROSTAT_RUNTIME_DIR", str(sockets))
        control_socket = ControlSocket("j7")
        control_socket.register(selector, lambda request, connection: connection.answer(STATUS))
        over, wakes = os.pipe()
        selector.register(over, selectors.EVENT_READ, None)

        def serve() -> None:
            while True:
                for key, _ in selector.select():
                    if key.data is None:
                        return
                    key.data()

        thread = threading.Thread(target=serve)
        thread.start()
        patch.undo()
        yield
        os.close(wakes)
        thread.join()
        os.close(over)
        control_socket.close()


def test_status_of_all_after_the_daemon_was_killed(quiet: Quiet, monkeypatch: pytest.MonkeyPatch) -> None:
    """The jobs that train on are shown."""
    quiet.home.announce("http://127.0.0.1:9")
    with a_job_that_trains(quiet.home.sockets, monkeypatch):
        shown = invoke("status")
    assert "j7: step 7, 4 virtual workers on 2 (workers 0, 1), training\n" in shown
    assert "the cluster at http://127.0.0.1:9 does not answer" in shown
    assert "`gyrostat up` takes them over" in shown


def test_status_of_nothing(quiet: Quiet) -> None:
    assert invoke("status") == "no job is running\n"


def test_stop_names_the_verbs_for_a_job_of_the_cluster(quiet: Quiet) -> None:
    invoke("submit", "train.py")
    with pytest.raises(
        UsageError, match=r"`gyrostat pause train` checkpoints it .* `gyrostat cancel train` ends it"
    ):
        invoke("stop", "train")
