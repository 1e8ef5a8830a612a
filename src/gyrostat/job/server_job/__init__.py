"""A job with parameter servers, from outside: its worker processes, requests, events and outcome.

The sibling of `job.control.leader`, which leads a synchronous job. Workers here know nothing of one another, so there are no
generations, placements or fences: a worker is started, trains shards until it is told to leave or dies, and another takes its
place. Parameters, shard queues and server processes are those of `gyrostat.ps.control`, in the same event loop.

    workers    which worker processes to start, ask to leave and kill; which death ends the job. Pure
    poison     a shard that kills every worker that trains it. Pure
    liveness   workers that do not answer, and a job that makes no progress
    tally      sums and events while it runs; the outcome
    port       what the leader needs of servers; `servers` has it from `gyrostat.ps.control`
    status     what clients see of it
    requests   what a client may ask of it
    leader     the job from its start to its end
    run        one job on this machine: the event loop, and the worker pool
"""
