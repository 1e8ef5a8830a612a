"""CPU time of the command line until the function of a verb is entered, and of a completion, beyond that of `python -c pass`.

Each measurement is a process of its own, and is paired with a `python -c pass` a moment apart. `side_verb.py` stops a verb
where its function is entered; a completion is measured to its end.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from figures import Figure, Options, Target, main
from pairs import Pair, measure_pairs
from side_verb import leaves

SIDE = Path(__file__).resolve().parent / "side_verb.py"
LIMIT_S = 0.15
TARGET = Target(at_most=1.0)
COMPLETIONS = ("gyrostat ", "gyrostat run --")
_MAIN = "from gyrostat.cli.main import main; main()"


def measure(options: Options) -> Iterator[Figure]:
    for verb in leaves():
        yield _figure(f"gyrostat {' '.join(verb)}", _entering(verb), options.pairs)
    for line in COMPLETIONS:
        yield _figure(f"completion of `{line}`", _completing(line), options.pairs)


def _figure(name: str, ours: Callable[[], float], pairs: int) -> Figure:
    measured = measure_pairs(ours, _nothing, pairs)
    return Figure(
        name=f"{name}, beyond `python -c pass`",
        ours="CPU",
        theirs="limit",
        unit="s",
        pairs=[Pair(pair.ours - pair.theirs, LIMIT_S) for pair in measured],
        target=TARGET,
    )


def _nothing() -> float:
    return _cpu([sys.executable, "-c", "pass"], {})


def _entering(verb: tuple[str, ...]) -> Callable[[], float]:
    command = [sys.executable, str(SIDE), *verb]
    return lambda: float(json.loads(subprocess.check_output(command))["cpu"])


def _completing(line: str) -> Callable[[], float]:
    words = {"COMP_WORDS": line, "COMP_CWORD": str(line.count(" ")), "_GYROSTAT_COMPLETE": "complete_bash"}
    return lambda: _cpu([sys.executable, "-c", _MAIN], words)


def _cpu(command: list[str], environment: dict[str, str]) -> float:
    """CPU seconds of the whole process."""
    process = subprocess.Popen(command, env={**os.environ, **environment}, stdout=subprocess.DEVNULL)
    _, _, used = os.wait4(process.pid, 0)
    process.returncode = 0  # it has been waited for
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main(__doc__ or "", measure, pairs=6)
