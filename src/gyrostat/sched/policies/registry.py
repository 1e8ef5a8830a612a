"""Policies by name: `tiresias`, or with settings `tiresias:queues=500/10000`.

Policies of this package are listed here. Others are found by entry point: a package with

    [project.entry-points."gyrostat.policies"]
    shortest = "my_package.shortest:Shortest"

adds `--policy shortest`. The settings after the name are keyword arguments of the policy's class, converted to the types
that its constructor annotates.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Any, get_type_hints

from gyrostat.core.errors import UsageError
from gyrostat.sched.policy import Policy

GROUP = "gyrostat.policies"
OURS: Mapping[str, str] = {
    "easyscale": "gyrostat.sched.policies.easyscale:EasyScale",
    "elastic-tiresias": "gyrostat.sched.policies.elastic_tiresias:ElasticTiresias",
    "fifo": "gyrostat.sched.policies.fifo:Fifo",
    "gandiva": "gyrostat.sched.policies.gandiva:Gandiva",
    "gavel": "gyrostat.sched.policies.gavel:Gavel",
    "gittins": "gyrostat.sched.policies.tiresias:Gittins",
    "optimus": "gyrostat.sched.policies.optimus:Optimus",
    "priority": "gyrostat.sched.policies.priority:StaticPriority",
    "tiresias": "gyrostat.sched.policies.tiresias:Tiresias",
    "wfs": "gyrostat.sched.policies.fairshare:FairShare",
}


def known_policies() -> dict[str, str]:
    """All policies: name, and module and class."""
    return {**{point.name: point.value for point in entry_points(group=GROUP)}, **OURS}


def find_policy(text: str) -> Policy:
    """`NAME` or `NAME:SETTING=VALUE,…`."""
    name, _, settings = text.partition(":")
    known = known_policies()
    if name not in known:
        raise UsageError(f"there is no policy {name!r}; there are {', '.join(sorted(known))}")
    kind = _load(name, known[name])
    if not (isinstance(kind, type) and issubclass(kind, Policy)):
        raise UsageError(f"policy {name!r} is {known[name]}, which is not a gyrostat.sched.policy.Policy")
    return kind(**_settings(name, kind, settings))


def _load(name: str, where: str) -> Any:
    module, _, attribute = where.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise UsageError(f"policy {name!r} cannot be loaded from {where}: {error}") from error


def _settings(name: str, kind: Any, text: str) -> dict[str, Any]:
    accepted = {parameter for parameter in inspect.signature(kind).parameters if parameter != "self"}
    hints = get_type_hints(kind.__init__)
    values: dict[str, Any] = {}
    for part in filter(None, text.split(",")):
        setting, equals, value = part.partition("=")
        if not equals or setting not in accepted:
            raise UsageError(
                f"policy {name!r} has no setting {part!r}; "
                + (f"it has {', '.join(sorted(accepted))}" if accepted else "it has none")
            )
        values[setting] = _parse(name, setting, value, hints.get(setting, str))
    return values


def _parse(name: str, setting: str, value: str, hint: Any) -> Any:
    try:
        if hint is bool:
            return {"yes": True, "true": True, "no": False, "false": False}[value.lower()]
        if hint in (int, float):
            return hint(value)
        if hint == tuple[float, ...]:
            return tuple(float(number) for number in value.split("/"))
    except (ValueError, KeyError):
        raise UsageError(f"policy {name!r}: {setting} cannot be {value!r}") from None
    return value
