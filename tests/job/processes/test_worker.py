"""A worker is a Python program like any other: its environment, arguments, output, exit code and death."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from gyrostat.core.job import CheckpointPolicy
from gyrostat.core.placement import Placement
from gyrostat.job.launcher import RunRequest, run_job
from gyrostat.job.processes.output import OutputStream
from gyrostat.job.processes.protocol import Program
from gyrostat.job.processes.start import WorkerForkServer
from tests.conftest import Launch
from tests.job.worker_doubles import Listener


def test_it_sees_what_libraries_look_for(launch: Launch, tmp_path: Path) -> None:
    script = """
        import json, os, sys, torch
        names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE OMP_NUM_THREADS PYTHONHASHSEED MINE".split()
        print(json.dumps({
            "env": {name: os.environ.get(name) for name in names},
            "argv": sys.argv[1:],
            "path": sys.path[0],
            "name": __name__,
            "file": __file__,
            "cwd": os.getcwd(),
            "threads": torch.get_num_threads(),
            "hash": hash("gyrostat"),
            "stdin": sys.stdin.read(),
            "main": sys.modules["__main__"].__file__,
        }))
    """
    listener = Listener()
    launch(
        script,
        virtual_workers=5,
        workers=2,
        args=["--lr", "0.1", "--", "-x"],
        threads=2,
        env={"MINE": "yes"},
        observer=listener,
    )
    seen = [json.loads(listener.of(worker)[0]) for worker in (0, 1)]
    for worker in (0, 1):
        assert seen[worker]["env"] == {
            "RANK": str(worker),
            "LOCAL_RANK": str(worker),
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "OMP_NUM_THREADS": "2",
            "PYTHONHASHSEED": os.environ.get("PYTHONHASHSEED", "0"),
            "MINE": "yes",
        }
        assert seen[worker]["argv"] == ["--lr", "0.1", "--", "-x"]
        assert seen[worker]["path"] == seen[worker]["cwd"] == str(tmp_path)
        assert seen[worker]["file"] == seen[worker]["main"] == str(tmp_path / "script0.py")
        assert (seen[worker]["name"], seen[worker]["threads"], seen[worker]["stdin"]) == ("__main__", 2, "")
    assert seen[0]["hash"] == seen[1]["hash"]


def test_two_threads_work_after_the_fork(launch: Launch) -> None:
    listener = Listener()
    script = "import torch; a = torch.ones(512, 512); print(float((a @ a).sum()))"
    launch(script, threads=2, observer=listener)
    assert listener.of(0) == [str(512.0**3)]


def test_a_module_runs_as_with_python_m(fork_server: WorkerForkServer, tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "other.py").write_text("VALUE = 42\n")
    (package / "train.py").write_text(
        "import sys\nfrom .other import VALUE\nprint(__name__, __package__, VALUE, sys.argv[1:])\n"
    )
    request = RunRequest(
        program=Program(name="package.train", module=True, args=("--lr", "1")),
        placement=Placement.even(1, 1),
        cwd=tmp_path,
    )
    listener = Listener()
    run_job(request, parent=fork_server, observer=listener).check()
    assert listener.of(0) == ["__main__ package 42 ['--lr', '1']"]


def test_stdout_and_stderr_stay_apart(launch: Launch) -> None:
    listener = Listener()
    launch(
        "import os, sys\nprint('größe')\nprint('no end', end='', file=sys.stderr)\nos.write(1, b'raw\\n')",
        observer=listener,
    )
    assert [line for _, stream, line in listener.lines if stream is OutputStream.STDOUT] == ["größe", "raw"]
    assert [line for _, stream, line in listener.lines if stream is OutputStream.STDERR] == ["no end"]


@pytest.mark.parametrize(
    ("leave", "code"),
    [
        ("sys.exit()", 0),
        ("sys.exit(0)", 0),
        ("sys.exit(3)", 3),
        ("sys.exit('no data')", 1),
        ("raise SystemExit(300)", 300 & 0xFF),
        ("os._exit(5)", 5),
    ],
)
def test_exit_codes_are_the_scripts(launch: Launch, leave: str, code: int) -> None:
    listener = Listener()
    outcome = launch(f"import os, sys\n{leave}\nprint('not reached')", check=False, observer=listener)
    assert (outcome.exit_codes, outcome.exit_code) == ((code,), code)
    assert listener.of(0) == (["no data"] if "no data" in leave else [])
    if code:
        assert str(outcome.failure) == f"worker 0 exited with code {code}"
    else:
        assert outcome.ok


def test_a_process_that_ends_in_the_middle_of_its_script_has_no_result(launch: Launch) -> None:
    outcome = launch("import os\nos._exit(0)", check=False)
    assert (outcome.exit_codes, outcome.exit_code) == ((0,), 1)
    assert str(outcome.failure) == "worker 0 exited before its script had ended"


def test_what_was_registered_with_atexit_runs_and_threads_are_waited_for(launch: Launch) -> None:
    script = """
        import atexit, threading
        atexit.register(print, "last words")
        go = threading.Event()
        def late():
            go.wait()
            print("from the thread")
        threading.Thread(target=late).start()
        threading.Timer(0.05, go.set).start()
    """
    listener = Listener()
    launch(script, observer=listener)
    assert listener.of(0) == ["from the thread", "last words"]


def test_a_traceback_begins_with_the_users_own_code(launch: Launch, tmp_path: Path) -> None:
    script = "def f():\n    raise ValueError('boom')\n\nf()\n"
    failure = launch(script, check=False).failure
    assert failure is not None
    path = tmp_path / "script0.py"
    assert failure.traceback is not None
    lines = [line for line in failure.traceback.splitlines() if not set(line.strip()) <= {"^", "~"}]
    assert lines == [
        "Traceback (most recent call last):",
        f'  File "{path}", line 4, in <module>',
        "    f()",
        f'  File "{path}", line 2, in f',
        "    raise ValueError('boom')",
        "ValueError: boom",
    ]


def test_a_syntax_error_points_into_the_script(launch: Launch, tmp_path: Path) -> None:
    failure = launch("x = (\n", check=False).failure
    assert failure is not None
    assert failure.summary == "raised SyntaxError: '(' was never closed (script0.py, line 1)"
    assert failure.traceback is not None
    assert failure.traceback.startswith(f'  File "{tmp_path / "script0.py"}", line 1')


def test_misuse_is_reported_at_the_line_of_the_script(launch: Launch, tmp_path: Path) -> None:
    outcome = launch("import gyrostat\ngyrostat.init(seed=-1)\n", check=False)
    assert outcome.exit_code == 2
    assert outcome.failure is not None
    assert outcome.failure.traceback is not None
    frames = [line for line in outcome.failure.traceback.splitlines() if line.startswith("  File")]
    assert frames == [f'  File "{tmp_path / "script0.py"}", line 2, in <module>']


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_do_what_they_do_to_any_program(launch: Launch, number: signal.Signals) -> None:
    listener = Listener(react=lambda worker, line: os.kill(int(line), number) if line.isdigit() else None)
    script = """
        import os, time
        print(os.getpid())
        while True:
            time.sleep(0.01)
    """
    outcome = launch(script, check=False, observer=listener)
    assert outcome.exit_codes == (-number,)
    assert str(outcome.failure) == f"worker 0 was killed by {number.name}"


def test_a_script_may_clean_up_after_ctrl_c(launch: Launch) -> None:
    script = """
        import os, time
        try:
            print(os.getpid())
            while True:
                time.sleep(0.01)
        except KeyboardInterrupt:
            print("cleaned up")
            raise
    """
    listener = Listener(
        react=lambda worker, line: os.kill(int(line), signal.SIGINT) if line.isdigit() else None
    )
    assert launch(script, check=False, observer=listener).exit_codes == (-signal.SIGINT,)
    assert listener.of(0)[1:] == ["cleaned up"]


def test_in_a_job_that_checkpoints_a_stop_waits_for_a_boundary(launch: Launch, tmp_path: Path) -> None:
    """Nothing of the engine runs in this script, so there is no boundary: the signal must not end it."""
    script = """
        import os, signal
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGUSR1)
        print("still here")
    """
    listener = Listener()
    launch(script, checkpoint=CheckpointPolicy(directory=str(tmp_path)), observer=listener)
    assert listener.of(0) == ["still here"]


def test_everything_heavy_is_imported_before_the_fork(launch: Launch) -> None:
    listener = Listener()
    script = """
        import sys
        print(*(name in sys.modules for name in ("torch._dynamo", "numpy", "gyrostat.engine.script.session")))
        before = set(sys.modules)
        import torch
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        print(len(set(sys.modules) - before) <= 3)
    """
    launch(script, observer=listener)
    assert listener.of(0) == ["True True True", "True"]


def test_the_script_needs_no_more_files_than_any(launch: Launch) -> None:
    """What belongs to the fork server or to others is closed: 0, 1, 2, the socket, its notes, and this listing's own."""
    listener = Listener()
    launch(
        "import os; print(len(os.listdir('/proc/self/fd')))", virtual_workers=2, workers=2, observer=listener
    )
    assert listener.of(0) == listener.of(1) == ["6"]
