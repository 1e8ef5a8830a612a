"""Leader election: the agent that holds the job's lease leads.

    store = open_store("etcd://10.0.0.1:2379/jobs/42")        # or file:///var/run/jobs/42
    with Campaign(store, "10.0.0.7:4100", on_lead=…, on_follow=…, on_lost=…):
        …

`base` defines a lease store: the lease, and values that only its holder can write. `file` implements it on one machine, `etcd`
across machines (`etcd_gateway` and `etcd_messages`: the requests to etcd); `address` opens a store. `election` decides what an
agent does next, without I/O; `campaign` has the threads that do it.
"""

from __future__ import annotations

from gyrostat.job.nodes.lease.address import open_store
from gyrostat.job.nodes.lease.base import Lease, LeaseStore, LeaseView
from gyrostat.job.nodes.lease.campaign import Campaign
from gyrostat.job.nodes.lease.election import Timing

__all__ = ["Campaign", "Lease", "LeaseStore", "Timing", "LeaseView", "open_store"]
