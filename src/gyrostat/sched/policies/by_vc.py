"""Policies that differ by VC, as text: `fifo;prod=tiresias:queues=500/10000`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gyrostat.core.errors import UsageError
from gyrostat.core.roles import ServerCapacity
from gyrostat.sched.policies.registry import find_policy
from gyrostat.sched.tenant_state import Vc


def vcs_by_policy(
    names: Sequence[str],
    weights: Mapping[str, float],
    policy: str,
    servers: Mapping[str, ServerCapacity] | None = None,
) -> list[Vc]:
    """The VCs of these names and weights, each with its policy. `servers`: of each; None: not limited."""
    default, _, rest = policy.partition(";")
    special: dict[str, str] = {}
    for part in filter(None, rest.split(";")):
        vc, equals, named = part.partition("=")
        if not equals or vc not in names:
            raise UsageError(
                f"policies by VC are written POLICY;VC=POLICY;…; {part!r} names none of {', '.join(names)}"
            )
        special[vc] = named
    return [
        Vc(
            name=name,
            policy=find_policy(special.get(name, default)),
            weight=weights.get(name, 1.0),
            servers=None if servers is None else servers.get(name, ServerCapacity()),
        )
        for name in names
    ]
