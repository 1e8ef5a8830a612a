"""The intra-job planner: the best split of a job's virtual workers over devices of several types, and which to request.

    split         the fastest split of N virtual workers over given devices, with EasyScale's Eq. 1
    companion     a job's estimates of its own throughput: proposals, measurements, devices to release
    history       a first profile for a job that has never run
    definition    when a job is defined: micro-batch sizes per device type for a global batch (VirtualFlow's solver)
    tables        profiles from VirtualFlow's and Gavel's published files

All pure. Planning at run time only moves virtual workers; only `definition` proposes batch sizes.
"""
