"""The leader's part of a job with parameter servers: one loop, in the process that leads the job.

leader             `PsLeader`: servers and workers connect to it; it carries out what `protocol.coordinator` decides
settings           `PsSettings`
status             what the leader shows: `PsStatus` and `PsEvent`
worker_desk        requests of workers: shards, evaluations, checkpoints; those that have to wait
evaluations        which worker evaluates which part of a dataset, and the results
server_fleet       the servers that should exist: how many, of how many cores; a server of c cores is c processes
server_processes   starts and ends processes, and notices their ends
checkpoint_files   manifests: what is valid, what can be deleted
balance            hot and slow servers: what to do about them, and the evidence
"""
