"""What a principal may see of the cluster. Pure.

For a tenant, other tenants' jobs do not exist: devices that they hold are just busy, and a reason that names one says
"another job". Operators see everything.
"""

from __future__ import annotations

import re
from collections.abc import Collection

import msgspec

from gyrostat.cluster.api.messages import Device, Use
from gyrostat.cluster.api.tokens import Principal
from gyrostat.cluster.records import DeviceRecord, EventRecord, JobRecord, Waiting

_ID = re.compile(r"\bj[0-9]+\b")
_OTHER = "another job"


def tenant_of(principal: Principal) -> str | None:
    """The tenant whose jobs it may see and change; None: all."""
    return None if principal.operator else principal.tenant


class PrincipalView:
    """Responses as one principal may see them."""

    def __init__(self, principal: Principal, own: Collection[str]) -> None:
        """`own`: ids of the jobs that it may see."""
        self._all = principal.operator
        self._tenant = principal.tenant
        self._own = own

    def job(self, record: JobRecord) -> JobRecord:
        reason = self.text(record.reason)
        return record if reason == record.reason else msgspec.structs.replace(record, reason=reason)

    def waiting(self, waiting: Waiting) -> Waiting:
        return msgspec.structs.replace(
            waiting, why=self.text(waiting.why), what_helps=self.text(waiting.what_helps)
        )

    def event(self, event: EventRecord) -> EventRecord:
        return msgspec.structs.replace(event, reason=self.text(event.reason))

    def device(self, record: DeviceRecord) -> Device:
        seen = self._all or record.tenant == self._tenant
        use = Use.RESERVED if record.reserved else Use.FREE if record.job is None else Use.BUSY
        return Device(
            id=record.id,
            name=record.name,
            type=record.type,
            node=record.node,
            cell=record.cell,
            use=use,
            pace=record.pace,
            cpus=record.cpus,
            memory=record.memory,
            job=record.job if seen else None,
            tenant=record.tenant if seen else None,
            borrowed=record.borrowed and seen,
        )

    def text(self, text: str) -> str:
        """Without the ids of jobs that it may not see."""
        if self._all:
            return text
        return _ID.sub(lambda match: match[0] if match[0] in self._own else _OTHER, text)
