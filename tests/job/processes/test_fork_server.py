"""The fork server: from start to end, with one launcher and with successive agents."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from datetime import timedelta
from pathlib import Path

import msgspec
import pytest

from gyrostat.core.errors import ScriptFailed
from gyrostat.core.placement import Placement
from gyrostat.engine.torch_internals import rendezvous
from gyrostat.job.launcher import RunRequest, run_job
from gyrostat.job.processes import protocol
from gyrostat.job.processes.channel import Channel
from gyrostat.job.processes.protocol import (
    Children,
    Exited,
    Fork,
    FromForkServer,
    Hello,
    Program,
    WorkerId,
    WorkerSpec,
)
from gyrostat.job.processes.start import WorkerForkServer
from tests.conftest import Launch
from tests.job.processes.test_protocol import SPEC
from tests.job.worker_doubles import Departure, Listener


def threads(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/task").iterdir()))


def test_it_has_one_thread_before_and_after_it_forked(fork_server: WorkerForkServer, launch: Launch) -> None:
    assert threads(fork_server.pid) == 1
    launch("import torch; torch.ones(100, 100) @ torch.ones(100, 100)", threads=2)
    assert threads(fork_server.pid) == 1


def test_it_is_the_parent_of_its_workers_and_keeps_no_files_of_theirs(
    fork_server: WorkerForkServer, launch: Launch
) -> None:
    before = os.listdir(f"/proc/{fork_server.pid}/fd")
    listener = Listener()
    launch("import os; print(os.getppid())", virtual_workers=2, workers=2, observer=listener)
    assert listener.of(0) == listener.of(1) == [str(fork_server.pid)]
    assert os.listdir(f"/proc/{fork_server.pid}/fd") == before


def test_everything_ends_when_the_launcher_is_killed(launch: Launch) -> None:
    worker = launch.script("import os, signal; print(os.getpid(), os.getppid()); signal.pause()")
    launcher = launch.script(
        f"""
        import sys
        from gyrostat.core.placement import Placement
        from gyrostat.job.launcher import RunRequest, run_job
        from gyrostat.job.control.observer import NullObserver
        from gyrostat.job.processes.protocol import Program

        class Tell(NullObserver):
            def printed(self, worker, stream, line):
                print(line, flush=True)

        program = Program(name={str(worker)!r})
        run_job(RunRequest(program=program, placement=Placement.even(2, 2)), observer=Tell())
        """
    )
    with subprocess.Popen([sys.executable, launcher], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline().split() for _ in range(2)]
        departures = [Departure(pid) for pid in {int(pid) for line in lines for pid in line}]
        assert len(departures) == 3
        process.kill()
    for departure in departures:
        departure.wait()


@pytest.mark.parametrize(
    "message", [Hello(protocol.VERSION + 1, 1), Fork(SPEC)], ids=["version", "no greeting"]
)
def test_it_leaves_when_the_other_end_is_no_launcher(
    message: Hello | Fork, capfd: pytest.CaptureFixture[str]
) -> None:
    """It dies of the first wrong word, so nothing can be forked by mistake."""
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "gyrostat.job.processes.fork_server", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
        )
    channel: Channel[FromForkServer] = Channel(ours, FromForkServer)
    channel.send(message)
    assert process.wait(60) == 1
    channel.close()
    assert "ProtocolError" in capfd.readouterr().err


def test_two_threads_are_refused() -> None:
    program = """
import threading
from gyrostat.job.processes import fork_server
threading.Thread(target=threading.Event().wait, daemon=True).start()
fork_server.PRELOAD = ()
fork_server.preload()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 1
    assert "has 2 OS threads" in done.stderr


FORKED = """
import os, select, signal, sys
from gyrostat.job.processes.start import WorkerForkServer

parent = WorkerForkServer.forked()
parent.wait_until_ready()
print(parent.pid, flush=True)
"""


def test_a_forked_fork_server_behaves_like_a_fresh_one(tmp_path: Path) -> None:
    program = f"""{FORKED}
assert parent.exits() == []
killed = parent.pid
os.kill(killed, signal.SIGKILL)
select.select([parent], [], [])
assert parent.exits() == []
assert parent.pid != killed
parent.close()
with WorkerForkServer.forked() as another:
    another.wait_until_ready()
assert another._await_end() == 0
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (pid,) = done.stdout.splitlines()
    assert done.stderr == f"the fork server (process {pid}) ended with exit code -9; starting another one\n"


def test_a_copy_ends_with_the_process_that_it_is_a_copy_of() -> None:
    program = f"{FORKED}\nsignal.pause()"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        departure = Departure(int(process.stdout.readline()))
        process.kill()
        assert process.stdout.read() == b"", "the copy keeps the standard output of its parent"
    departure.wait()


def test_what_has_two_threads_is_not_copied() -> None:
    program = """
import threading
from gyrostat.job.processes.start import WorkerForkServer
threading.Thread(target=threading.Event().wait, daemon=True).start()
WorkerForkServer.forked()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 1
    assert "has 2 OS threads" in done.stderr


def test_the_users_own_hash_seed_counts(launch: Launch, tmp_path: Path) -> None:
    script = launch.script("import os; print(hash('gyrostat'), os.environ['PYTHONHASHSEED'])")
    expected = subprocess.check_output(
        [sys.executable, "-c", "print(hash('gyrostat'))"],
        env={**os.environ, "PYTHONHASHSEED": "5"},
        text=True,
    )
    listener = Listener()
    with WorkerForkServer({**os.environ, "PYTHONHASHSEED": "5"}) as parent:
        request = RunRequest(
            program=Program(name=str(script)), placement=Placement.even(1, 1), env={"PYTHONHASHSEED": "5"}
        )
        run_job(request, parent=parent, observer=listener).check()
    assert listener.of(0) == [f"{expected.strip()} 5"]


def test_a_worker_that_is_signalled_after_its_end_is_left_alone(fork_server: WorkerForkServer) -> None:
    fork_server.signal(os.getpid(), signal.SIGKILL)  # not one of its workers: nothing happens
    assert fork_server.exits() == []


def test_one_that_outlives_its_agent_is_adopted(tmp_path: Path, launch: Launch) -> None:
    """Its workers live on; the next agent receives their list, and the exits before it came."""
    place = tmp_path / "fork_server.socket"
    spec = spec_of(launch.script("import signal; signal.pause()"), tmp_path)
    first = WorkerForkServer(outlives=(place, 60.0))
    (lives, one), (dies, other) = (start(first, spec, member) for member in (0, 1))
    departure = Departure(dies)
    first.signal(dies, signal.SIGKILL)
    departure.wait()
    first._channel.close()  # as if the agent had been killed
    second = WorkerForkServer.adopt(place)
    assert second is not None
    assert second.pid == first.pid
    assert second.children == Children({lives: WorkerId(0, 0)}, [(WorkerId(0, 1), -signal.SIGKILL)])
    third, last = start(second, spec, 2)
    departures = [Departure(pid) for pid in (lives, third)]
    second.close()
    for gone in departures:
        gone.wait()
    first.close()
    assert WorkerForkServer.adopt(place) is None
    for channel in (one, other, last):
        channel.close()


def test_workers_of_another_run_are_forgotten(tmp_path: Path, launch: Launch) -> None:
    """Numbers of workers begin anew in each run of a job: an exit of an earlier one is not that of its namesake."""
    place = tmp_path / "fork_server.socket"
    spec = spec_of(launch.script("import signal; signal.pause()"), tmp_path)
    server = WorkerForkServer(outlives=(place, 60.0))
    (old, one), (dies, other) = (
        start(server, msgspec.structs.replace(spec, run="first"), member) for member in (0, 1)
    )
    departures = [Departure(old), Departure(dies)]
    server.signal(dies, signal.SIGKILL)
    departures[1].wait()
    pid, channel = start(server, msgspec.structs.replace(spec, run="second"), 0)
    departures[0].wait()
    server._channel.close()
    adopted = WorkerForkServer.adopt(place)
    assert adopted is not None
    assert adopted.children == Children({pid: WorkerId(0, 0)}, [], "second")
    adopted.close()
    server.close()
    for each in (one, other, channel):
        each.close()


def test_an_agent_is_killed_while_its_fork_server_loads(tmp_path: Path) -> None:
    """The next agent waits for it, rather than starting another one, whose workers nobody would find."""
    place = tmp_path / "fork_server.socket"
    first = WorkerForkServer(outlives=(place, 60.0))
    first._channel.close()
    second = WorkerForkServer.adopt(place)
    assert second is not None
    assert (second.pid, second.children) == (first.pid, Children({}, []))
    second.close()
    first.close()


def test_one_that_is_killed_while_it_loads_is_replaced(tmp_path: Path) -> None:
    """Not for ever: what kills it may kill the next one, too."""
    with WorkerForkServer() as server:
        first = server.pid
        os.kill(first, signal.SIGKILL)
        server.signal(
            first + 1, signal.SIGTERM
        )  # of a worker of one before it: nothing is sent before it is ready
        server.wait_until_ready()
        assert server.pid != first
    with WorkerForkServer() as server:
        with pytest.raises(ScriptFailed, match="ended with exit code -9"):  # noqa: PT012
            while True:
                os.kill(server.pid, signal.SIGKILL)
                server._replace()


def test_one_that_was_adopted_is_replaced(tmp_path: Path, launch: Launch) -> None:
    """Its workers are reported as killed, the rendezvous stays where it is, and the next agent finds its successor."""
    place = tmp_path / "fork_server.socket"
    first = WorkerForkServer(outlives=(place, 60.0))
    pid, channel = start(first, spec_of(launch.script("import signal; signal.pause()"), tmp_path), 0)
    first._channel.close()
    second = WorkerForkServer.adopt(place, 60.0)
    assert second is not None
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
        second.serve_store(listener)
    os.kill(second.pid, signal.SIGKILL)
    exits: list[Exited] = []
    while not exits:
        exits = second.exits()
    assert exits == [Exited(pid, -signal.SIGKILL)]
    second.wait_until_ready()
    assert second.pid != first.pid
    store = rendezvous("tcp://{}:{}/name".format(*address), 1, "prefix", timedelta(seconds=60))
    store.set("key", "value")
    assert store.get("key") == b"value"
    second._channel.close()
    third = WorkerForkServer.adopt(place)
    assert third is not None
    assert third.pid == second.pid
    for server in (third, second, first):
        server.close()
    channel.close()


def test_an_agent_is_killed_while_it_starts_a_worker(tmp_path: Path, launch: Launch) -> None:
    """The worker is forked although nobody reads the reply, and the rendezvous is served without the agent."""
    place = tmp_path / "fork_server.socket"
    spec = spec_of(launch.script("import signal; signal.pause()"), tmp_path)
    first = WorkerForkServer(outlives=(place, 60.0))
    first.wait_until_ready()
    ours, theirs = socket.socketpair()
    with socket.create_server(("127.0.0.1", 0)) as listener, theirs, open(os.devnull, "w") as nothing:
        address = listener.getsockname()
        first.serve_store(listener)
        first._channel.send(Fork(spec), [nothing.fileno(), nothing.fileno(), theirs.fileno()])
        first._channel.close()
    second = WorkerForkServer.adopt(place)
    assert second is not None
    assert list(second.children.living.values()) == [spec.worker_id]
    socket.create_connection(address).close()
    second.close()
    first.close()
    ours.close()


def test_one_that_is_about_to_end_is_not_adopted(tmp_path: Path) -> None:
    place = tmp_path / "fork_server.socket"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(place))
        listener.listen()
        ends = threading.Thread(target=lambda: listener.accept()[0].close())
        ends.start()
        assert WorkerForkServer.adopt(place) is None
        ends.join()


def test_workers_of_one_that_nobody_adopts_are_killed(tmp_path: Path, launch: Launch) -> None:
    script = launch.script("import signal; signal.pause()")
    parent = WorkerForkServer(outlives=(tmp_path / "fork_server.socket", 0.1))
    pid, channel = start(parent, spec_of(script, tmp_path), 0)
    departures = [Departure(pid), Departure(parent.pid)]
    parent._channel.close()
    for departure in departures:
        departure.wait()
    parent.close()
    channel.close()


def spec_of(script: Path, directory: Path) -> WorkerSpec:
    request = RunRequest(program=Program(name=str(script)), placement=Placement.even(1, 1), cwd=directory)
    return request.spec(request.assignment(0, ""))


def start(parent: WorkerForkServer, spec: WorkerSpec, member: int) -> tuple[int, socket.socket]:
    """Its process id, and our end of its channel."""
    ours, theirs = socket.socketpair()
    with theirs, open(os.devnull, "w") as nothing:
        named = msgspec.structs.replace(spec, worker_id=WorkerId(0, member))
        return parent.start(named, nothing.fileno(), nothing.fileno(), theirs), ours
