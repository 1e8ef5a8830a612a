"""Options that have been renamed. The old name still works, is not shown in help, and prints a note on stderr."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from typer.core import TyperCommand

from gyrostat.core.logs import note


def accepting(renamed: Mapping[str, str]) -> type[TyperCommand]:
    """The class of a command that also accepts these old option names; each maps to its new one."""

    class Command(TyperCommand):
        def make_parser(self, ctx: Any) -> Any:
            parser: Any = super().make_parser(ctx)
            targets = {old: self._option(new) for old, new in renamed.items()}
            for old, option in targets.items():
                parser.add_option(obj=option, opts=[old], dest=old, action="store", nargs=1)
            parse = parser.parse_args

            def parse_args(args: list[str]) -> Any:
                values, rest, order = parse(args)
                for old, option in targets.items():
                    if old in values:
                        values.setdefault(option.name, values.pop(old))
                        if not ctx.resilient_parsing:
                            note(f"{old} is now {renamed[old]}")
                return values, rest, order

            parser.parse_args = parse_args
            return parser

        def _option(self, name: str) -> Any:
            return next(option for option in self.params if name in option.opts)

    return Command
