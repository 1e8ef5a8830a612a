"""Lines of a script that are known to break reproducibility, found by parsing it, without running it. Pure.

None of them is wrong in itself: `job.is_main` is right for printing. So they are shown only when runs have differed, and only
those that fit the difference. `loopcode` finds those in loops.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeGuard

from gyrostat.job.verify import loopcode
from gyrostat.job.verify.loopcode import GENERATORS, last_of, name_of


class Hint(StrEnum):
    """How a line may break reproducibility."""

    UNSEEDED = "unseeded"
    CLOCK = "clock"
    OWN_GENERATOR = "own generator"
    HELD_STATE = "held state"
    COUNTER = "counter"
    LOCAL_VALUE = "local value"
    WORKER = "worker"
    DIRECT_CALL = "direct call"
    COMPILE = "compile"


@dataclass(frozen=True, order=True)
class Suspect:
    file: str
    line: int
    text: str
    """The expression."""
    hint: Hint

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.text}"


_ENTROPY = {"os.urandom", "os.getrandom", "torch.seed", "random.SystemRandom", "uuid.uuid1", "uuid.uuid4"}
_CLOCKS = {f"time.{name}{ns}" for name in ("time", "monotonic", "perf_counter") for ns in ("", "_ns")}
_CLOCKS |= {"datetime.now", "datetime.datetime.now", "datetime.utcnow"}
_FIXED_SEED = {"torch.Generator", "Generator"}  # has a default seed, always the same
_WORKER_NAMES = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"}
_WORKER_CALLS = {"os.getpid", "os.getppid", "socket.gethostname", "platform.node"}
_NO_MODULES = ("optim", "sched", "scaler", "plateau")
_ORDINARY = {  # methods of a module that do not run it
    *("add_module", "apply", "bfloat16", "buffers", "children", "compile", "cpu", "cuda", "double", "eval"),
    *("extra_repr", "float", "half", "items", "keys", "load_state_dict", "modules", "named_buffers"),
    *("named_children", "named_modules", "named_parameters", "parameters", "requires_grad_", "share_memory"),
    *("state_dict", "to", "to_empty", "train", "type", "update_parameters", "values", "zero_grad"),
}


def find_suspects(file: str, source: str) -> list[Suspect]:
    """All suspects of one file, by line; none if it cannot be parsed."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return []
    return sorted({Suspect(file, node.lineno, _text(node), hint) for node, hint in _all(tree)})


def imported(source: str) -> list[str]:
    """The dotted names of all modules that a file imports."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return []
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return list(dict.fromkeys(names))


def _all(tree: ast.Module) -> Iterator[tuple[ast.expr | ast.stmt, Hint]]:
    yield from ((node, Hint.HELD_STATE) for node in loopcode.changed_attributes(tree))
    yield from ((node, Hint.COUNTER) for node in loopcode.counters(tree))
    yield from ((node, Hint.OWN_GENERATOR) for node in loopcode.draws_from_own_generators(tree))
    yield from ((node, Hint.LOCAL_VALUE) for node in loopcode.values_of_one_virtual_worker(tree))
    tracked = set(_tracked(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and (hint := _call(node, tracked)):
            yield node, hint
        elif _depends_on_worker(node):
            yield node, Hint.WORKER


def _call(node: ast.Call, tracked: set[str]) -> Hint | None:
    name, last = name_of(node.func), last_of(node.func)
    wants_seed = last == "seed" or (last in GENERATORS and name not in _FIXED_SEED)
    if name in _ENTROPY or name.startswith("secrets.") or (wants_seed and not (node.args or node.keywords)):
        return Hint.UNSEEDED
    if name in _CLOCKS:
        return Hint.CLOCK
    if name in _WORKER_CALLS or (last in ("get", "getenv") and any(map(_is_worker_name, node.args))):
        return Hint.WORKER
    if name == "torch.compile" or (last == "compile" and name.split(".")[0] in tracked):
        return Hint.COMPILE
    if "." in name and name.rsplit(".", 1)[0] in tracked and not _ordinary(last):
        return Hint.DIRECT_CALL
    return None


def _tracked(tree: ast.Module) -> Iterator[str]:
    """The variables that hold modules of the job, judged by the names under which they are tracked."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and name_of(node.func).endswith(".track"):
            for keyword in node.keywords:
                named = (keyword.arg or "optimizers").lower()
                if isinstance(keyword.value, ast.Name) and not any(part in named for part in _NO_MODULES):
                    yield keyword.value.id


def _ordinary(method: str) -> bool:
    return method in _ORDINARY or method.startswith(("register_", "set_", "get_"))


def _depends_on_worker(node: ast.AST) -> TypeGuard[ast.expr]:
    """`os.environ["RANK"]`, `job.is_main`."""
    if isinstance(node, ast.Subscript):
        return _is_worker_name(node.slice)
    return isinstance(node, ast.Attribute) and node.attr == "is_main"


def _is_worker_name(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value in _WORKER_NAMES


def _text(node: ast.AST) -> str:
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= 80 else text[:79] + "…"
