"""Inside one job: how its virtual workers are best split over devices of several types, and which devices to ask for.

    split         the fastest split of N virtual workers over given devices; EasyScale's Eq. 1 for it
    companion     what a job knows about its own speed while it runs: proposals, measurements, devices to give back
    history       a first profile for a job that has never run
    definition    when a job is defined: micro-batch sizes per device type for a global batch (VirtualFlow's solver)
    tables        profiles out of VirtualFlow's and Gavel's published files

All pure. Run-time planning moves virtual workers and nothing else; only `definition` proposes batch sizes.
"""
