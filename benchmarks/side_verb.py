"""One verb up to the point where its function is entered: `side_verb.py run`, `side_verb.py checkpoint show`.

Prints the CPU seconds of the process and the imported modules as JSON. Required parameters get the value 1.
"""

from __future__ import annotations

import json
import resource
import sys
from typing import Any

from gyrostat.cli import main, verbs


def leaves() -> list[tuple[str, ...]]:
    """All verbs, and the commands of those that have several."""
    found = ((name, getattr(verbs.load_verb(name), "commands", {"": None})) for name in verbs.VERBS)
    return [tuple(filter(None, (name, sub))) for name, commands in found for sub in commands]


def entered(**values: Any) -> None:
    used = resource.getrusage(resource.RUSAGE_SELF)
    print(json.dumps({"cpu": used.ru_utime + used.ru_stime, "modules": sorted(sys.modules)}))


def enter(verb: str, *subcommands: str) -> None:
    root = command = verbs.load_verb(verb)
    for name in subcommands:
        command = command.commands[name]
    command.callback = entered
    required = [parameter for parameter in command.params if parameter.required]
    options = [item for each in required if each.opts[0].startswith("-") for item in (each.opts[0], "1")]
    arguments = ["1" for each in required if not each.opts[0].startswith("-")]
    verbs.load_verb = lambda name: root
    sys.argv = ["gyrostat", verb, *subcommands, *options, *arguments]
    main.main()


if __name__ == "__main__":
    enter(*sys.argv[1:])
