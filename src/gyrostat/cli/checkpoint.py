"""`gyrostat checkpoint`: look at checkpoints, check them, ask for one, and exchange them with other programs.

The formats are in `engine.checkpoint`; it is imported by each command for itself, since it takes torch with
it and `gyrostat --help` should not wait for that.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gyrostat.core.errors import CheckpointError, UsageError
from gyrostat.job.control import run_file
from gyrostat.job.control.client import JobClient, RequestFailed
from gyrostat.job.control.control_socket import NAMES

if TYPE_CHECKING:
    from gyrostat.engine.checkpoint import Description, JobSnapshot

app = typer.Typer(no_args_is_help=True, help="Show, verify, export, import and request checkpoints.")


def register(parent: typer.Typer) -> None:
    parent.add_typer(app, name="checkpoint")


_LOOK_AGAIN_S = 0.05
_ASK_AGAIN_S = 2.0

Place = Annotated[
    Path,
    typer.Argument(metavar="PATH", show_default=False, help="A directory of checkpoints, or a single one."),
]
Directory = Annotated[
    Path, typer.Argument(metavar="DIR", show_default=False, help="The directory of a job's checkpoints.")
]


@app.command()
def show(path: Place) -> None:
    """List the checkpoints of a directory, or what is in a single one."""
    from gyrostat.cli import checkpoint_tables

    if _is_single(path):
        checkpoint_tables.print_details(_describe(path))
    else:
        checkpoint_tables.print_list(_all(path))


@app.command()
def verify(path: Place) -> None:
    """Read every byte and compare checksums. Exit code 1 if anything is damaged."""
    from gyrostat.engine.checkpoint import verify as problems_of

    damaged = False
    for each in [path] if _is_single(path) else _all(path):
        problems = problems_of(each)
        damaged = damaged or bool(problems)
        print("\n".join(problems) or f"checkpoint {each} is whole")
    if damaged:
        raise typer.Exit(1)


@app.command("export")
def export_(
    path: Place,
    output: Annotated[
        Path,
        typer.Argument(metavar="FILE", show_default=False, help="What to write: .safetensors, .pt or .pth."),
    ],
    name: Annotated[str, typer.Option(metavar="NAME", help="What it was tracked as.")] = "model",
) -> None:
    """Write the plain state_dict of a tracked module, for inference or for other programs.

    Of a directory, the newest checkpoint that is whole is taken. An existing FILE is replaced.
    """
    from gyrostat.engine.checkpoint.exchange import state_dict_of, write_plain

    source, snapshot = _newest(path)
    state = state_dict_of(snapshot, name)
    write_plain(state, output)
    print(f"{output}: {name} of step {snapshot.progress.step}, {len(state)} entries, from {source}")


@app.command("import")
def import_(
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE", show_default=False, help="A torch.save or .safetensors file."),
    ],
    directory: Directory,
    pairs: Annotated[
        list[str] | None,
        typer.Option(
            "--map",
            metavar="NAME=ENTRY",
            show_default="entries with usual names",
            help="Track the file's ENTRY as NAME; may be given several times. NAME= takes the whole file.",
        ),
    ] = None,
    epoch: Annotated[
        int,
        typer.Option(metavar="E", min=-1, help="The epoch to begin with; -1: there is no job.epochs."),
    ] = 0,
    step: Annotated[int, typer.Option(metavar="S", min=0, help="Count steps from here.")] = 0,
    keep_prefix: Annotated[bool, typer.Option(help="Leave a prefix `module.` on all names.")] = False,
) -> None:
    """Make a checkpoint out of a plain DDP one.

    A `gyrostat run --checkpoint-dir DIR` then begins with its values, and with fresh random states. Nothing
    but tensors and plain values is read from FILE: no code in it is ever run.
    """
    from gyrostat.engine.checkpoint import CheckpointStore, list_checkpoints
    from gyrostat.engine.checkpoint.exchange import imported, pick, read_plain

    if list_checkpoints(directory) or run_file.find(directory):
        raise UsageError(
            f"{directory} is in use already: it has checkpoints or a running job; give an empty directory"
        )
    picked = pick(read_plain(file), _parse_map(pairs or []), keep_prefix=keep_prefix)
    path = CheckpointStore(directory).save(imported(picked.states, step=step, epoch=epoch))
    print(f"{path}: {', '.join(picked.states)}; goes on with epoch {max(epoch, 0)} at step {step}")
    if picked.left_out:
        print(
            f"gyrostat: not imported: {', '.join(picked.left_out)}; --map NAME=ENTRY takes more",
            file=sys.stderr,
        )


@app.command()
def save(
    directory: Annotated[
        Path,
        typer.Argument(
            metavar="DIR|JOB",
            show_default=False,
            help="The directory of a job's checkpoints, or the job's name: that does not wait until it is written.",
        ),
    ],
    timeout: Annotated[float, typer.Option(metavar="SECONDS", min=0, help="Wait at most so long.")] = 600,
) -> None:
    """Ask the running job for a checkpoint now, wait until it is there, and print its path."""
    if not directory.exists() and len(directory.parts) == 1 and NAMES.fullmatch(str(directory)):
        with JobClient(str(directory)) as job:
            answer = job.checkpoint()
        if not answer.done:
            raise RequestFailed(answer.text)
        print(answer.text)
        return
    run = run_file.find(directory)
    if run is None:
        raise UsageError(
            f"no job is running with the checkpoint directory {directory}; "
            f"start one with `gyrostat run --checkpoint-dir {directory} …`"
        )
    # One that is being written now is older than the question. Its directory stays the same when it is renamed.
    before = _inodes(directory) | _inodes(directory, ".writing-step-*")
    end = time.monotonic() + timeout
    asked = -math.inf
    while not (fresh := [path for inode, path in _inodes(directory).items() if inode not in before]):
        # A job whose workers are just starting does not hear us: ask again. More than once means once.
        again = asked > 0 and _is_writing(directory)
        if time.monotonic() > asked + _ASK_AGAIN_S and _listens(run.pid) and not again:
            os.kill(run.pid, signal.SIGUSR1)
            asked = time.monotonic()
        _pause(directory, end)
    print(max(fresh, key=lambda path: path.name))


def _is_writing(directory: Path) -> bool:
    return any(directory.glob(".writing-step-*"))


def _pause(directory: Path, end: float) -> None:
    """Give the job some time; an error if it has ended, or has had enough."""
    if time.monotonic() > end:
        raise CheckpointError(
            f"no new checkpoint has appeared in {directory} in time; one is written when the running step is "
            "complete. Give a longer --timeout, or look at the output of the run"
        )
    if run_file.find(directory) is None:
        raise CheckpointError(
            f"the job of {directory} ended before it wrote a checkpoint; look at the output of the run"
        )
    time.sleep(_LOOK_AGAIN_S)


def _inodes(directory: Path, names: str = "step-????????*") -> dict[int, Path]:
    """Checkpoints by what they are on the disk: one that replaces another has the same name."""
    found: dict[int, Path] = {}
    for path in directory.glob(names):
        if path.suffix != ".replaced":
            with contextlib.suppress(FileNotFoundError):  # removed, or renamed, since it was listed
                found[path.stat().st_ino] = path
    return found


def _listens(pid: int) -> bool:
    """Whether the process handles our signal; one that has only just begun would die of it."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return True  # no such file system, or gone: the kill will tell
    caught = next(line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught, 16) >> (signal.SIGUSR1 - 1) & 1)


def _is_single(path: Path) -> bool:
    return (path / "manifest.json").exists() or path.name.startswith("step-")


def _all(directory: Path) -> list[Path]:
    from gyrostat.engine.checkpoint import list_checkpoints

    found = list_checkpoints(directory)
    if not found:
        raise UsageError(
            f"there are no checkpoints in {directory}; give the --checkpoint-dir of a run, or one of them"
        )
    return found


def _describe(path: Path) -> Description:
    from gyrostat.engine.checkpoint import describe

    return describe(path)


def _newest(path: Path) -> tuple[Path, JobSnapshot]:
    """The checkpoint itself, or the newest whole one of a directory; those passed over are named."""
    from gyrostat.engine.checkpoint import load

    if _is_single(path):
        return path, load(path)
    for each in _all(path):
        try:
            return each, load(each)
        except CheckpointError as error:
            print(f"gyrostat: {error}", file=sys.stderr)
    raise CheckpointError(f"no checkpoint in {path} is whole")


def _parse_map(pairs: list[str]) -> dict[str, str]:
    wanted = {}
    for pair in pairs:
        name, equals, entry = pair.partition("=")
        if not equals or not name:
            raise UsageError(f"--map takes NAME=ENTRY, such as model=model_state_dict; got {pair!r}")
        wanted[name] = entry
    return wanted
