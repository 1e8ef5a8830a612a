"""No module or class is too large to read. What exceeds a limit is listed with the reason."""

from __future__ import annotations

import ast

from tests.source_tree import classes, modules

MOST_LINES = 450
MOST_METHODS = 20
MOST_ATTRIBUTES = 15

LONG_MODULES: dict[str, str] = {}
MANY_METHODS = {
    "job.control.coordinator.Coordinator": "a pure state machine with one method for each event that it decides on",
}
MANY_ATTRIBUTES = {
    "job.control.worker_tracker.WorkerTracker": "a table of one attempt: a column for each fact known of its workers",
    "job.nodes.agent.Agent": "the edge of a node: owns its sockets, store, campaign, workers and term until it closes them",
    "sched.cells.free_lists.FreeLists": "one data structure: parallel arrays by level and index that change together",
    "sched.views.JobView": "plain data that policies read; one object per job, on the simulator's hot path",
    "sim.records.Records": "columns of one table, and four curves; plain data that reports read",
}


def _compare(found: set[str], listed: dict[str, str]) -> None:
    assert found - listed.keys() == set(), "split these, or list them with the reason"
    assert listed.keys() - found == set(), "these are within the limit: remove them from the list"


def _public_methods(node: ast.ClassDef) -> set[str]:
    functions = (each for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef))
    return {each.name for each in functions if not each.name.startswith("_")}


def _attributes(node: ast.ClassDef) -> set[str]:
    """Attributes that `__init__` assigns to self, or the fields of a dataclass."""
    found = set()
    for each in node.body:
        if isinstance(each, ast.FunctionDef) and each.name == "__init__":
            found |= {
                target.attr
                for target in ast.walk(each)
                if isinstance(target, ast.Attribute)
                and isinstance(target.ctx, ast.Store)
                and ast.unparse(target.value) == "self"
            }
        elif isinstance(each, ast.AnnAssign) and _is_decorated(node, "dataclass"):
            found.add(ast.unparse(each.target))
    return found


def _is_decorated(node: ast.ClassDef, *parts: str) -> bool:
    return any(all(part in ast.unparse(each) for part in parts) for each in node.decorator_list)


def _is_value(node: ast.ClassDef) -> bool:
    """Messages and values, whose fields are their interface: frozen dataclasses, Structs, Protocols."""
    bases = {ast.unparse(base).rpartition(".")[2] for base in node.bases}
    return bool(bases & {"Struct", "Protocol"}) or _is_decorated(node, "dataclass", "frozen=True")


def test_modules_are_short() -> None:
    _compare({module.name for module in modules() if module.lines > MOST_LINES}, LONG_MODULES)


def test_classes_have_few_public_methods() -> None:
    _compare(
        {found.name for found in classes() if len(_public_methods(found.node)) > MOST_METHODS}, MANY_METHODS
    )


def test_classes_have_few_attributes() -> None:
    _compare(
        {
            found.name
            for found in classes()
            if not _is_value(found.node) and len(_attributes(found.node)) > MOST_ATTRIBUTES
        },
        MANY_ATTRIBUTES,
    )
