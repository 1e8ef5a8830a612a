"""A worker runs what it opened, and only from below the directories that it must be below."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from gyrostat.core.errors import UsageError
from gyrostat.job.processes.confined import Beneath, check_program, open_beneath
from gyrostat.job.processes.protocol import Program


@pytest.fixture
def places(tmp_path: Path) -> Path:
    """`root` with a script, a module beside it and links; `outside` with another script."""
    for name, text in (
        ("root/train.py", "import beside, pickle, sys\nclass C: pass\npickle.dumps(C())\n"
         "print(__name__, __file__, beside.__name__, sys.argv[1:])\nraise ValueError('end')\n"),
        ("root/beside.py", ""),
        ("outside/train.py", "print('outside')\n"),
        ("root-not/train.py", ""),
        ("train.py", ""),
    ):  # fmt: skip
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    os.symlink("train.py", tmp_path / "root/inside.py")
    os.symlink(tmp_path / "outside/train.py", tmp_path / "root/leads_out.py")
    os.symlink(tmp_path / "outside", tmp_path / "root/out")
    os.symlink(tmp_path / "root", tmp_path / "alias")
    return tmp_path


def beneath(places: Path) -> Beneath:
    return ((str(places / "nowhere"), str(places / "root")), (str(places / "alias"),))


@pytest.mark.parametrize("name", ["root/train.py", "root/inside.py", "alias/train.py"])
def test_what_lies_below_may_be_opened(places: Path, name: str) -> None:
    file, real = open_beneath(str(places / name), beneath(places), "script")
    os.close(file)
    assert real == str(places / "root/train.py")


@pytest.mark.parametrize(
    "name",
    [
        "root/leads_out.py",
        "root/out/train.py",
        "outside/train.py",
        "root-not/train.py",
        "root/out/../train.py",
    ],
)
def test_what_does_not_is_refused(places: Path, name: str) -> None:
    for workdir, script in ((places, name), (places / "root", str(places / name))):
        with pytest.raises(UsageError, match="is not below"):
            check_program(Program(name=script, beneath=beneath(places)), str(workdir))
    with pytest.raises(UsageError, match="cannot be opened: No such file"):
        open_beneath(str(places / "root/none.py"), beneath(places), "script")


def run(places: Path, script: str) -> subprocess.CompletedProcess[str]:
    code = f"""
    import sys
    from gyrostat.job.processes import confined, worker
    from gyrostat.job.processes.protocol import Program
    beneath = {beneath(places)!r}
    confined.enter_directory({str(places / "alias")!r}, beneath)
    try:
        worker.run_program(Program(name={script!r}, args=("x",), beneath=beneath))
    except Exception as error:
        print(worker.format_traceback(error.with_traceback(error.__traceback__.tb_next)))
    """
    return subprocess.run(
        [sys.executable, "-P", "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120
    )


def test_a_script_runs_as_if_python_ran_it(places: Path) -> None:
    found = run(places, "train.py")
    path = places / "root/train.py"
    assert found.stdout.splitlines()[0] == f"__main__ {path} beside ['x']", found
    assert f"File \"{path}\", line 5, in <module>\n    raise ValueError('end')" in found.stdout
    assert "confined.py" not in found.stdout


def test_a_script_outside_does_not_run(places: Path) -> None:
    found = run(places, "leads_out.py")
    assert "outside\n" not in found.stdout.splitlines(keepends=True)
    assert f"is at {places / 'outside/train.py'}, which is not below" in found.stdout
