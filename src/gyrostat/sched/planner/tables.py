"""Profiles out of published files: VirtualFlow's (samples per second by batch size) and Gavel's (steps per second by number
of devices). A parsed JSON document in, profiles by workload out; our own form and lists of it, too.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping

from gyrostat.core.errors import UsageError
from gyrostat.core.profile import Points, Profile, Speed, points

_BATCH = re.compile(r"^(?P<name>.*?) \(batch size (?P<batch>\d+)\)$")


def profiles_of(document: object) -> dict[str, Profile]:
    """By workload, whichever of the known forms the document has."""
    if isinstance(document, list):
        found = [Profile.from_json(each) for each in document]
        return {profile.workload: profile for profile in found}
    if not isinstance(document, Mapping) or not document:
        raise UsageError("a file of profiles is a JSON object, or a list of them; see docs/howto/plan.md")
    if "throughput" in document:
        profile = Profile.from_json(document)
        return {profile.workload: profile}
    if any(_BATCH.match(name) for _, name, _ in _entries(document)):
        return _gavel(document)
    return _virtualflow(document)


def _virtualflow(document: Mapping[str, object]) -> dict[str, Profile]:
    """type → workload → batch size → samples per second."""
    speeds: dict[str, dict[str, Speed]] = defaultdict(dict)
    for device_type, workload, rates in _entries(document):
        speeds[workload][device_type] = Speed(points(rates, f"{workload} on {device_type}"))
    return {workload: Profile(workload, by_type) for workload, by_type in speeds.items()}


def _gavel(document: Mapping[str, object]) -> dict[str, Profile]:
    """type → "workload (batch size b)" → devices → steps per second of all devices together (0.0: does not fit).

    Each device takes b samples per step, so n devices take n / rate seconds for a round of one micro-batch each. What that
    exceeds one device's time by is the exchange: of the smallest batch measured, as VirtualFlow does it (§5.1.2), so
    that as little computing as possible is mistaken for it. A workload without a batch size in its name has size 1.
    Types that are called …_unconsolidated are the same devices spread over nodes.
    """
    rates: dict[str, dict[str, dict[int, Points]]] = defaultdict(lambda: defaultdict(dict))
    for device_type, entry, by_devices in _entries(document):
        match = _BATCH.match(entry)
        workload, batch = (match["name"], int(match["batch"])) if match else (entry, 1)
        known = tuple((n, rate) for n, rate in points(by_devices, f"{entry} on {device_type}") if rate > 0)
        if known and known[0][0] == 1:
            rates[workload][device_type][batch] = known
    return {
        workload: Profile(workload, {name: _gavel_speed(batches) for name, batches in by_type.items()})
        for workload, by_type in rates.items()
    }


def _gavel_speed(batches: Mapping[int, Points]) -> Speed:
    throughput = tuple((batch, batch * known[0][1]) for batch, known in sorted(batches.items()))
    smallest = batches[min(batches)]
    alone = 1 / smallest[0][1]
    exchange = tuple((n, max(0.0, n / rate - alone)) for n, rate in smallest[1:])
    return Speed(throughput, exchange)


def _entries(document: Mapping[str, object]) -> Iterator[tuple[str, str, object]]:
    for device_type, workloads in document.items():
        if not isinstance(workloads, Mapping):
            raise UsageError(
                f"expected device types with their workloads, but {device_type!r} holds {workloads!r}; "
                "see docs/howto/plan.md for the forms that are read"
            )
        for workload, rates in workloads.items():
            yield device_type, str(workload), rates
