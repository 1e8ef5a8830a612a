"""Finds suspects in repeated code: the loops over steps, and the methods that are called for every sample or micro-batch. For
`suspects`. Pure.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import TypeVar

GENERATORS = {"Generator", "default_rng", "RandomState", "Random", "SFC64", "PCG64", "MT19937", "Philox"}
_PER_SAMPLE = {"__getitem__", "__getitems__", "__call__", "forward"}
_ONLY_SHOWN = {"print", "log", "info", "debug", "write", "append", "set_postfix", "add_scalar"}

Node = TypeVar("Node", bound=ast.AST)
Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Module


def name_of(node: ast.expr) -> str:
    """`a.b.c` as it is written; subscripts count as their base."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{name_of(node.value)}.{node.attr}"
    return name_of(node.value) if isinstance(node, ast.Subscript) else ""


def last_of(node: ast.expr) -> str:
    """The last part of a dotted name."""
    return name_of(node).rsplit(".", 1)[-1]


def is_steps(node: ast.expr) -> bool:
    """Whether this is `job.steps(…)`, counted or not."""
    if not isinstance(node, ast.Call):
        return False
    counted = name_of(node.func) == "enumerate" and bool(node.args) and is_steps(node.args[0])
    return counted or name_of(node.func).endswith(".steps")


def changed_attributes(tree: ast.Module) -> Iterator[ast.stmt]:
    """Assignments to attributes in methods that are called for every sample or micro-batch."""
    for function in _functions(tree):
        if isinstance(function, ast.Module) or function.name not in _PER_SAMPLE:
            continue
        for node in ast.walk(function):
            if any(name_of(target).startswith("self.") for target in _targets(node)):
                assert isinstance(node, ast.stmt)
                yield node


def counters(tree: ast.Module) -> Iterator[ast.expr | ast.stmt]:
    """Variables of the script that a loop over steps counts up, and `enumerate(job.steps(…))`."""
    for loop in _steps_loops(tree):
        if isinstance(loop.iter, ast.Call) and name_of(loop.iter.func) == "enumerate":
            yield loop.iter
        for node in ast.walk(loop):
            if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
                yield node


def draws_from_own_generators(tree: ast.Module) -> Iterator[ast.Call]:
    """Calls in loops over steps, and in functions, that use a generator created outside."""
    generators = {
        name_of(target)
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and _makes_generator(node.value)
        for target in node.targets
    }
    for function in _functions(tree):
        own = {name_of(target) for node in _own(function, ast.Assign) for target in _targets(node)}
        foreign = (
            set() if isinstance(function, ast.Module) or function.name == "__init__" else generators - own
        )
        yield from (call for call in _own(function, ast.Call) if _uses(call, foreign))
    for loop in _steps_loops(tree):
        yield from (call for call in ast.walk(loop) if isinstance(call, ast.Call) and _uses(call, generators))


def values_of_one_virtual_worker(tree: ast.Module) -> Iterator[ast.expr | ast.stmt]:
    """Uses after the inner loop of values assigned in it, other than printing and adding."""
    for function in _functions(tree):
        for loop in _own(function, ast.For):
            inner = [node for node in ast.walk(loop) if isinstance(node, ast.For) and _iterates(node, loop)]
            if not is_steps(loop.iter) or not inner:
                continue
            made = set().union(*map(_made_in, inner))
            end = max(node.end_lineno or 0 for node in inner)
            for part in map(_deciding, _own(function, ast.stmt)):
                if part is not None and part.lineno > end and _reads(part, made):
                    yield part


def _deciding(statement: ast.stmt) -> ast.expr | ast.stmt | None:
    """The part of a statement that can influence training; None if it only prints or adds."""
    if isinstance(statement, (ast.If, ast.While)):
        return statement.test
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        return None if last_of(statement.value.func) in _ONLY_SHOWN else statement
    return statement if isinstance(statement, (ast.Assign, ast.AnnAssign)) else None


def _reads(part: ast.AST, names: set[str]) -> bool:
    return any(
        isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in names
        for node in ast.walk(part)
    )


def _iterates(inner: ast.For, loop: ast.For) -> bool:
    """Whether `inner` is the inner loop, `for … in step`, of a loop over steps."""
    return any(
        isinstance(part, ast.Name) and part.id == name_of(inner.iter) for part in ast.walk(loop.target)
    )


def _made_in(loop: ast.For) -> set[str]:
    """Names assigned in the loop, except results of `job.mean(…)`."""
    made: set[str] = set()
    for node in ast.walk(loop):
        if isinstance(node, ast.Assign):
            mean = isinstance(node.value, ast.Call) and name_of(node.value.func).endswith("job.mean")
            if not mean:
                made |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return made


def _makes_generator(node: ast.expr) -> bool:
    """`torch.Generator().manual_seed(1)` and the like."""
    while isinstance(node, ast.Call):
        if last_of(node.func) in GENERATORS:
            return True
        node = node.func.value if isinstance(node.func, ast.Attribute) else node.func
    return False


def _uses(call: ast.Call, generators: set[str]) -> bool:
    values = [*call.args, *(keyword.value for keyword in call.keywords)]
    if isinstance(call.func, ast.Attribute):
        values.append(call.func.value)
    return any(name_of(value) in generators for value in values)


def _functions(tree: ast.Module) -> Iterator[Function]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Module)):
            yield node


def _own(function: Function, kind: type[Node]) -> Iterator[Node]:
    """Nodes of a kind in a function, without those of functions and classes inside it."""
    waiting: list[ast.AST] = list(ast.iter_child_nodes(function))
    while waiting:
        node = waiting.pop(0)
        if isinstance(node, kind):
            yield node
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            waiting += ast.iter_child_nodes(node)


def _steps_loops(tree: ast.Module) -> Iterator[ast.For]:
    for node in ast.walk(tree):
        if isinstance(node, ast.For) and is_steps(node.iter):
            yield node


def _targets(node: ast.AST) -> list[ast.expr]:
    """What a statement assigns to; nothing if it is no assignment."""
    if isinstance(node, ast.Assign):
        return node.targets
    return [node.target] if isinstance(node, ast.AugAssign) else []
