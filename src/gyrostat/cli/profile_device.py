"""`gyrostat profile-device`: the throughput of a script by batch size on this device, for `gyrostat plan`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from gyrostat.cli import log_options
from gyrostat.cli.script_options import Args, Module, Script
from gyrostat.core import logs
from gyrostat.core.errors import UsageError
from gyrostat.core.files import check_writable, read_text
from gyrostat.core.profile import Profile

_HELP = "\n\n".join(
    [
        "Measure the throughput of a script by batch size on this device, and the cost of the gradient exchange.",
        "Runs some steps for each batch size on one worker, and on several workers for the exchange. The script is not "
        "changed: its data loaders use the measured batch size instead of their own.",
        "Options stand before the script; all arguments after it are passed to the script.",
        "[bold]Examples[/bold]",
        "  gyrostat profile-device --batches 8,16,32,48,64 train.py",
        "  gyrostat profile-device --batches 32,64 --profile profiles.json --workload resnet50 train.py --epochs 9",
        "With --profile FILE, the result is added to the workload's profile in FILE, or replaces the entry of this device "
        "type. Measure on a machine of each type; then `gyrostat plan --profile FILE` splits the job over them.",
    ]
)


def register(app: typer.Typer) -> None:
    app.command(
        "profile-device",
        help=_HELP,
        context_settings={"allow_interspersed_args": False},
    )(profile)


def profile(
    script: Script,
    args: Args = None,
    module: Module = False,
    batches: Annotated[str, typer.Option(metavar="B,…", help="Batch sizes to measure.")] = "8,16,32,48,64",
    workers: Annotated[
        str,
        typer.Option(metavar="P,…", help="Numbers of workers for the exchange; 1: do not measure it."),
    ] = "2",
    steps: Annotated[int, typer.Option(metavar="K", help="Steps to measure for each batch size.")] = 20,
    threads: Annotated[int, typer.Option(metavar="T", min=1, help="Threads per worker.")] = 1,
    device_type: Annotated[
        str | None,
        typer.Option("--type", metavar="NAME", show_default="the detected type", help="Device type."),
    ] = None,
    workload: Annotated[
        str | None,
        typer.Option(metavar="NAME", show_default="the script's name", help="Name of the workload."),
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option("--profile", metavar="FILE", show_default="print it", help="File to add the result to."),
    ] = None,
    verbose: log_options.Verbose = 0,
    log_format: log_options.Format = None,
) -> None:
    from gyrostat.job.control.report import write_json
    from gyrostat.job.device_profile import DeviceProfileRequest, profile_device
    from gyrostat.job.processes.protocol import Program
    from gyrostat.job.processes.start import WorkerForkServer

    logs.configure(verbose, log_format)
    if file is not None:
        check_writable(file, "--profile")
    request = DeviceProfileRequest(
        program=Program(name=script, module=module, args=tuple(args or ())),
        batches=_numbers("--batches", batches),
        workers=tuple(number for number in _numbers("--workers", workers) if number != 1),
        steps=steps,
        threads=threads,
        device_type=device_type,
        workload=workload,
    )
    request.check()
    known = None if file is None or not file.exists() else _read(file)
    with WorkerForkServer() as parent:
        found = profile_device(request, parent, report=logs.note)
    if file is None:
        print(json.dumps(found.to_json()))
    else:
        write_json(file, merged(known, found).to_json())


def merged(known: Profile | None, found: Profile) -> Profile:
    """The known profile with the device types of the new one added or replaced."""
    if known is None:
        return found
    if known.workload != found.workload:
        raise UsageError(
            f"the file has the profile of {known.workload!r}, this is {found.workload!r}; use another file, or "
            f"--workload {known.workload}"
        )
    return Profile(found.workload, {**known.speeds, **found.speeds})


def _read(file: Path) -> Profile:
    try:
        return Profile.from_json(json.loads(read_text(file)))
    except ValueError as error:
        raise UsageError(f"{file} is not JSON: {error}") from error


def _numbers(option: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UsageError(f"{option} takes whole numbers such as 8,16,32; got {text!r}") from None
