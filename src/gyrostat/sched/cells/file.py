"""The cell file: its format as types, from which the JSON schema is generated, and a reader that records line numbers.

The reader continues after an error, so that all errors are reported at once. `load` checks the contents.

File format: the fields of the Structs below are the keys of the file. Do not rename them.
"""

from __future__ import annotations

import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import yaml
from msgspec import Meta

Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")]
Positive = Annotated[int, Meta(ge=1)]
Above0 = Annotated[float, Meta(gt=0)]


class CellTypeEntry(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """One level of a hierarchy: a number of cells, or devices, of another type."""

    of: Annotated[
        Name,
        Meta(
            description="The type of its parts: another cell type, or a device type, which has no entry of its own."
        ),
    ]
    count: Annotated[Positive, Meta(description="Number of its parts.")]
    node: Annotated[
        bool, Meta(description="Whether this is a machine. Exactly one type of each hierarchy is.")
    ] = False


class TopCellEntry(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Cells of the physical cluster that are not part of larger ones."""

    cell: Annotated[Name, Meta(description="Their type.")]
    nodes: Annotated[
        list[str],
        Meta(description="Their machines, in order; node[0-7] and 10.0.1.0~7 stand for eight each."),
    ]


class PinnedEntry(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A virtual cell that is always bound to the same physical cell."""

    cell: Annotated[str, Meta(description="Its type.")]
    at: Annotated[
        str,
        Meta(description="A machine in the cell or, for cells smaller than a machine, a device: node3/4."),
    ]


class ServersEntry(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What the parameter servers of one tenant's jobs may use together, beside its cells."""

    cores: Annotated[Positive, Meta(description="CPU cores.")]
    memory: Annotated[Positive | None, Meta(description="Bytes of memory; by default not limited.")] = None


class VirtualClusterEntry(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The cells and the weight of one tenant."""

    cells: Annotated[
        dict[str, Positive],
        Meta(description="Number of cells by type; HIERARCHY/TYPE where the type alone is ambiguous."),
    ] = {}
    pinned: Annotated[
        dict[Name, PinnedEntry],
        Meta(
            description="Cells that are always bound to the same physical cells, by the name that jobs request them with."
        ),
    ] = {}
    servers: Annotated[
        ServersEntry | None,
        Meta(description="Cores and memory for parameter servers; by default it has none."),
    ] = None
    weight: Annotated[
        float, Meta(gt=0, description="Its share of opportunistic devices, relative to other tenants.")
    ] = 1.0


class DeviceTypeEntry(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """One device of a type that `gyrostat up` makes of a part of this machine."""

    pace: Annotated[
        Above0 | None,
        Meta(description="Samples per second of a paced slot, which sleeps instead of computing."),
    ] = None
    cpus: Annotated[Above0 | None, Meta(description="CPUs of a slot.")] = None
    memory: Annotated[Positive | None, Meta(description="Bytes of memory of a slot.")] = None


class CellFile(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A cluster of cells and its tenants."""

    cell_types: Annotated[dict[Name, CellTypeEntry], Meta(description="The hierarchies, type by type.")]
    physical_cluster: Annotated[list[TopCellEntry], Meta(description="The machines of the cluster.")]
    virtual_clusters: Annotated[dict[Name, VirtualClusterEntry], Meta(description="The tenants.")]
    priorities: Annotated[
        dict[Name, Annotated[int, Meta(ge=0, le=1000)]],
        Meta(
            description="Names for priorities of guaranteed jobs; within a tenant a higher number preempts a lower one."
        ),
    ] = {}
    device_types: Annotated[
        dict[Name, DeviceTypeEntry],
        Meta(
            description="Properties of device types whose devices are slots of one machine (`gyrostat up`)."
        ),
    ] = {}


def schema() -> dict[str, Any]:
    """JSON schema for editors."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **msgspec.json.schema(CellFile)}


@dataclass(frozen=True, order=True)
class CellFileProblem:
    """An error in a line of a file."""

    line: int
    reason: str

    def __str__(self) -> str:
        return f"line {self.line}: {self.reason}"


Path = tuple[str | int, ...]

_DEEPEST = 8
"""The format needs five."""
_LONGEST = 1_000_000
"""Most nodes of a file. YAML anchors that refer to anchors can expand to any number of them."""


@dataclass(frozen=True)
class LineIndex:
    """Line numbers: of a path of keys and positions, or of its nearest ancestor."""

    of: dict[Path, int]

    def __call__(self, *path: str | int) -> int:
        while path and path not in self.of:
            path = path[:-1]
        return self.of.get(path, 1)


def read(text: str) -> tuple[CellFile | None, LineIndex, list[CellFileProblem]]:
    """The contents of the file without invalid parts (None if too much is invalid), line numbers, and errors."""
    lines: dict[Path, int] = {(): 1}
    problems: list[CellFileProblem] = []
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        return (
            None,
            LineIndex(lines),
            [CellFileProblem(mark.line + 1 if mark else 1, f"not YAML: {error.problem}")],
        )
    except yaml.YAMLError as error:
        return None, LineIndex(lines), [CellFileProblem(1, f"not YAML: {error}")]
    if root is None:
        return None, LineIndex(lines), [CellFileProblem(1, "the file is empty")]
    plain = _plain(root, (), lines, problems)
    where = LineIndex(lines)
    mismatches = list(_mismatches(plain, CellFile, (), where))
    problems += [problem for _, problem in mismatches]
    while mismatches:
        if any(not path or path[0] == "cell_types" for path, _ in mismatches):
            return None, where, problems  # errors in the rest would follow from the missing cell types
        for path in sorted({path for path, _ in mismatches}, key=_order, reverse=True):
            _delete(plain, path)
        mismatches = list(_mismatches(plain, CellFile, (), where))
    return msgspec.convert(plain, CellFile), where, problems


def _order(path: Path) -> list[tuple[bool, str | int]]:
    return [(isinstance(key, str), key) for key in path]


def _delete(plain: Any, path: Path) -> None:
    for key in path[:-1]:
        plain = plain[key]
    del plain[path[-1]]


def _plain(node: yaml.Node, path: Path, lines: dict[Path, int], problems: list[CellFileProblem]) -> Any:
    lines.setdefault(path, node.start_mark.line + 1)
    if len(path) > _DEEPEST or len(lines) > _LONGEST:
        problems.append(
            CellFileProblem(node.start_mark.line + 1, "this is nested too deeply, or refers to itself")
        )
        return None
    if isinstance(node, yaml.MappingNode):
        result: dict[Any, Any] = {}
        for key_node, value in node.value:
            key = _plain(key_node, (*path, "?"), {}, problems)
            line = key_node.start_mark.line + 1
            if not isinstance(key, str | int | float | bool):
                problems.append(CellFileProblem(line, "a key must be a word"))
                continue
            key = key if isinstance(key, str) else str(key_node.value)
            if key in result:
                problems.append(
                    CellFileProblem(line, f"{key!r} is here twice; the first is in line {lines[*path, key]}")
                )
            lines[*path, key] = line
            result[key] = _plain(value, (*path, key), lines, problems)
        return result
    if isinstance(node, yaml.SequenceNode):
        return [_plain(item, (*path, place), lines, problems) for place, item in enumerate(node.value)]
    loader = yaml.SafeLoader("")
    try:
        return loader.construct_object(node, deep=True)
    except (yaml.YAMLError, ValueError) as error:
        problems.append(CellFileProblem(node.start_mark.line + 1, f"{node.value!r} cannot be read: {error}"))
        return None


def _mismatches(
    value: Any, wanted: Any, path: Path, lines: LineIndex
) -> Iterator[tuple[Path, CellFileProblem]]:
    """Every place where `value` does not have the type `wanted`."""
    origin, args = typing.get_origin(wanted), typing.get_args(wanted)
    while origin is Annotated and typing.get_origin(args[0]) is not None:
        wanted = args[0]
        origin, args = typing.get_origin(wanted), typing.get_args(wanted)
    if isinstance(wanted, type) and issubclass(wanted, msgspec.Struct) and isinstance(value, dict):
        yield from _struct_mismatches(value, wanted, path, lines)
    elif origin is dict and isinstance(value, dict):
        for key, item in value.items():
            yield from _mismatches(key, args[0], (*path, key), lines)
            yield from _mismatches(item, args[1], (*path, key), lines)
    elif origin is list and isinstance(value, list):
        for place, item in enumerate(value):
            yield from _mismatches(item, args[0], (*path, place), lines)
    else:
        try:
            msgspec.convert(value, wanted)
        except msgspec.ValidationError as error:
            yield path, CellFileProblem(lines(*path), f"{_path_name(path)} {_short(value)}: {error}")


def _struct_mismatches(
    value: dict[str, Any], wanted: type[msgspec.Struct], path: Path, lines: LineIndex
) -> Iterator[tuple[Path, CellFileProblem]]:
    fields = {field.name: field for field in msgspec.structs.fields(wanted)}
    for key in value.keys() - fields.keys():
        yield (
            (*path, key),
            CellFileProblem(
                lines(*path, key), f"{_path_name(path)} has no {key!r}; it has {', '.join(fields)}"
            ),
        )
    for name, field in fields.items():
        if name in value:
            yield from _mismatches(value[name], field.type, (*path, name), lines)
        elif field.required:
            yield path, CellFileProblem(lines(*path), f"{_path_name(path)} needs {name!r}")


def _path_name(path: Path) -> str:
    return ".".join(map(str, path)) or "the file"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
