"""Tables of checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from hashlib import sha256
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from gyrostat.core.errors import CheckpointError
from gyrostat.core.plural import plural
from gyrostat.engine.checkpoint import Description, describe, verify
from gyrostat.engine.state.statetree import TensorSpec


def print_list(paths: Sequence[Path]) -> None:
    """One row each. Reads all of them to find damaged ones."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("step", "epoch", "virtual workers", "size"):
        table.add_column(column, justify="right", no_wrap=column != "virtual workers")
    for column in ("written", "fingerprint", "state"):
        table.add_column(column, no_wrap=True)
    reasons = []
    for path in paths:
        try:
            description = describe(path)
        except CheckpointError as error:
            table.add_row(path.name.removeprefix("step-").lstrip("0"), *["?"] * 5, Text("damaged", "red"))
            reasons.append(str(error))
            continue
        problems = verify(path)
        reasons += problems
        table.add_row(*_cells(description), Text("damaged", "red") if problems else Text("valid", "green"))
    console = Console(highlight=False)
    console.print(table)
    for reason in reasons:
        console.print(Text(reason), soft_wrap=True)


def print_details(description: Description) -> None:
    """The contents of the manifest."""
    console = Console(highlight=False)
    facts = {
        "checkpoint": str(description.path),
        "progress": str(description.progress),
        "virtual workers": _virtual_workers(description),
        "written": f"{_time(description)} by gyrostat {description.gyrostat}, torch {description.torch}",
        "size": _bytes(description.size),
        **{f"job.{key}": repr(value) for key, value in description.job.items()},
        **{f"fingerprint.{key}": value for key, value in description.fingerprint.items()},
    }
    width = max(map(len, facts))
    for name, fact in facts.items():
        console.print(Text.assemble((name.ljust(width), "bold"), "  ", fact), soft_wrap=True)
    for title, tensors in (("shared", description.shared), ("contexts", description.contexts)):
        _print_tensors(console, title, tensors)


def _print_tensors(console: Console, title: str, tensors: Sequence[TensorSpec]) -> None:
    total = _bytes(sum(spec.size for spec in tensors))
    console.print(Text(f"\n{title}: {plural(len(tensors), 'tensor')}, {total}", "bold"))
    table = Table(box=None, pad_edge=False, show_header=False)
    for _ in ("name", "type", "shape"):
        table.add_column()
    table.add_column(justify="right")
    for spec in tensors:
        shape = "×".join(map(str, spec.shape)) or "scalar"
        table.add_row(Text(spec.name, overflow="fold"), spec.dtype, shape, _bytes(spec.size))
    console.print(table)


def _cells(description: Description) -> tuple[str, ...]:
    return (
        str(description.progress.step),
        _epoch(description),
        _virtual_workers(description),
        _bytes(description.size),
        _time(description),
        _short(description.fingerprint),
    )


def _epoch(description: Description) -> str:
    progress = description.progress
    return str(progress.epoch) if progress.epoch >= 0 else f"{progress.epochs_run} done"


def _virtual_workers(description: Description) -> str:
    return "any (imported)" if description.virtual_workers is None else str(description.virtual_workers)


def _time(description: Description) -> str:
    return datetime.fromtimestamp(description.created).isoformat(" ", "seconds")


def _short(fingerprint: dict[str, str]) -> str:
    """A hash, to compare two fingerprints; `print_details` shows all of it."""
    if not fingerprint:
        return "any"
    return sha256(repr(sorted(fingerprint.items())).encode()).hexdigest()[:8]


def _bytes(size: int) -> str:
    value, unit = float(size), "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 1000 or unit == "TB":
            break
        value /= 1000
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
