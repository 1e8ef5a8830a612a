"""`gyrostat checkpoint`: show, verify and request checkpoints, and exchange them with other programs.

The formats are in `engine.checkpoint`, which imports torch; so each command imports it itself.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gyrostat.core.errors import CheckpointError, UsageError
from gyrostat.core.files import check_writable, make_directory
from gyrostat.core.logs import note

if TYPE_CHECKING:
    from gyrostat.engine.checkpoint import Description, JobSnapshot

app = typer.Typer(no_args_is_help=True, help="Show, verify, export, import and request checkpoints.")


def register(parent: typer.Typer) -> None:
    parent.add_typer(app, name="checkpoint")


_LOOK_AGAIN_S = 0.05
_ASK_AGAIN_S = 2.0

Place = Annotated[
    Path,
    typer.Argument(
        metavar="PATH", show_default=False, help="Directory of checkpoints, or a single checkpoint."
    ),
]
Directory = Annotated[
    Path, typer.Argument(metavar="DIR", show_default=False, help="Directory of a job's checkpoints.")
]


@app.command()
def show(path: Place) -> None:
    """List the checkpoints of a directory, or show the contents of a single one."""
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
        print("\n".join(problems) or f"checkpoint {each} is complete and undamaged")
    if damaged:
        raise typer.Exit(1)


@app.command("export")
def export_(
    path: Place,
    output: Annotated[
        Path,
        typer.Argument(metavar="FILE", show_default=False, help="Output file: .safetensors, .pt or .pth."),
    ],
    name: Annotated[
        str, typer.Option(metavar="NAME", help="Name under which `job.track` registered the module.")
    ] = "model",
) -> None:
    """Write the plain state_dict of a tracked module, for inference or for other programs.

    From a directory, the newest undamaged checkpoint is exported. An existing FILE is replaced. Of a job with servers, all
    tables (ids and rows) and tracked modules are written into one .safetensors file.
    """
    from gyrostat.engine.checkpoint.exchange import state_dict_of, write_plain
    from gyrostat.ps.checkpoint.plain_tables import export_tables, holds_servers

    check_writable(output, "the file")
    if holds_servers(path):
        if output.suffix != ".safetensors":
            raise UsageError(f"tables are exported to .safetensors files, got {output}")
        manifest, plain = export_tables(path, output)
        print(f"{output}: {len(plain)} entries, from {manifest}")
        return
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
            help="Register the file's ENTRY as NAME. NAME= takes the whole file. May be repeated.",
        ),
    ] = None,
    epoch: Annotated[
        int,
        typer.Option(metavar="E", min=-1, help="First epoch; -1: the script does not use job.epochs."),
    ] = 0,
    step: Annotated[int, typer.Option(metavar="S", min=0, help="Number of the first step.")] = 0,
    keep_prefix: Annotated[bool, typer.Option(help="Keep the prefix `module.` of names.")] = False,
) -> None:
    """Convert a checkpoint of a plain DDP program, or an exported one of a job with servers.

    `gyrostat run --checkpoint-dir DIR` then starts from its values, with fresh random states. Only tensors and plain
    values are read from FILE; no code in it is executed.
    """
    from gyrostat.core.checkpoint_names import list_checkpoints
    from gyrostat.engine.checkpoint import CheckpointStore
    from gyrostat.engine.checkpoint.exchange import imported, pick, read_plain
    from gyrostat.job.control import run_file
    from gyrostat.ps.checkpoint.plain_tables import describes_servers, holds_servers, import_tables

    if list_checkpoints(directory) or run_file.find(directory):
        raise UsageError(f"{directory} already has checkpoints or a running job; give an empty directory")
    if describes_servers(file):
        if holds_servers(directory):
            raise UsageError(f"{directory} already has checkpoints; give an empty directory")
        make_directory(directory, "the directory")
        manifest = import_tables(file, directory)
        names = [table.name for table in manifest.spec.tables] + [each.name for each in manifest.spec.dense]
        print(f"{directory}: {', '.join(names)}; begins with epoch 0")
        return
    picked = pick(read_plain(file), _parse_map(pairs or []), keep_prefix=keep_prefix)
    make_directory(directory, "the directory")
    path = CheckpointStore(directory).save(imported(picked.states, step=step, epoch=epoch))
    print(f"{path}: {', '.join(picked.states)}; continues with epoch {max(epoch, 0)} at step {step}")
    if picked.left_out:
        note(f"not imported: {', '.join(picked.left_out)}; --map NAME=ENTRY takes more")


@app.command()
def save(
    directory: Annotated[
        Path,
        typer.Argument(
            metavar="DIR|JOB",
            show_default=False,
            help="Directory of the job's checkpoints, or name of the job (then the command does not wait).",
        ),
    ],
    timeout: Annotated[float, typer.Option(metavar="SECONDS", min=0, help="Maximum time to wait.")] = 600,
) -> None:
    """Request a checkpoint of a running job, wait until it is written, and print its path."""
    from gyrostat.job.control import run_file
    from gyrostat.job.control.client import JobClient, check
    from gyrostat.job.control.control_socket import NAMES

    if not directory.exists() and len(directory.parts) == 1 and NAMES.fullmatch(str(directory)):
        with JobClient(str(directory)) as job:
            print(check(job.checkpoint()).text)
        return
    run = run_file.find(directory)
    if run is None:
        raise UsageError(
            f"no job is running with the checkpoint directory {directory}; "
            f"start one with `gyrostat run --checkpoint-dir {directory} …`"
        )
    # A checkpoint that is being written now is older than this request. Its inode stays the same when it is renamed.
    before = _inodes(directory) | _inodes(directory, ".writing-step-*")
    end = time.monotonic() + timeout
    asked = -math.inf
    while not (fresh := [path for inode, path in _inodes(directory).items() if inode not in before]):
        # A job whose workers are starting does not handle the signal yet: send it again. Requests are idempotent.
        again = asked > 0 and _is_writing(directory)
        if time.monotonic() > asked + _ASK_AGAIN_S and _listens(run.pid) and not again:
            os.kill(run.pid, signal.SIGUSR1)
            asked = time.monotonic()
        _pause(directory, end)
    print(max(fresh, key=lambda path: path.name))


def _is_writing(directory: Path) -> bool:
    return any(directory.glob(".writing-step-*"))


def _pause(directory: Path, end: float) -> None:
    """Wait for a moment; raise an error after the timeout, or if the job has ended."""
    from gyrostat.job.control import run_file

    if time.monotonic() > end:
        raise CheckpointError(
            f"no new checkpoint has appeared in {directory} in time; it is written after the current step. "
            "Set a longer --timeout, or see the output of the run"
        )
    if run_file.find(directory) is None:
        raise CheckpointError(
            f"the job of {directory} ended before it wrote a checkpoint; see the output of the run"
        )
    time.sleep(_LOOK_AGAIN_S)


def _inodes(directory: Path, names: str = "step-????????*") -> dict[int, Path]:
    """Checkpoints by inode: a checkpoint that replaces another has the same name."""
    found: dict[int, Path] = {}
    for path in directory.glob(names):
        if path.suffix != ".replaced":
            with contextlib.suppress(FileNotFoundError):  # removed, or renamed, since it was listed
                found[path.stat().st_ino] = path
    return found


def _listens(pid: int) -> bool:
    """Whether the process handles SIGUSR1; a process that has just started would be killed by it."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return True  # no /proc, or the process has ended: `os.kill` reports it
    caught = next(line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught, 16) >> (signal.SIGUSR1 - 1) & 1)


def _is_single(path: Path) -> bool:
    return (path / "manifest.json").exists() or path.name.startswith("step-")


def _all(directory: Path) -> list[Path]:
    from gyrostat.core.checkpoint_names import list_checkpoints

    found = list_checkpoints(directory)
    if not found and any(directory.glob("servers-*.json")):
        raise UsageError(
            f"the checkpoints in {directory} are of a job with parameter servers; this command reads those of synchronous jobs"
        )
    if not found:
        raise UsageError(
            f"there are no checkpoints in {directory}; give the --checkpoint-dir of a run, or one of them"
        )
    return found


def _describe(path: Path) -> Description:
    from gyrostat.engine.checkpoint import describe

    return describe(path)


def _newest(path: Path) -> tuple[Path, JobSnapshot]:
    """The checkpoint itself, or the newest undamaged one of a directory. Reports those that were skipped."""
    from gyrostat.engine.checkpoint import load

    if _is_single(path):
        return path, load(path)
    for each in _all(path):
        try:
            return each, load(each)
        except CheckpointError as error:
            note(str(error))
    raise CheckpointError(f"no checkpoint in {path} is complete and undamaged")


def _parse_map(pairs: list[str]) -> dict[str, str]:
    wanted = {}
    for pair in pairs:
        name, equals, entry = pair.partition("=")
        if not equals or not name:
            raise UsageError(f"--map takes NAME=ENTRY, such as model=model_state_dict; got {pair!r}")
        wanted[name] = entry
    return wanted
