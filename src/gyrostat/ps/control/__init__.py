"""The leader's part of a job with parameter servers: one loop, in the process that leads the job.

leader             `PsLeader`: servers and workers connect to it; it carries out what `protocol.coordinator` decides
settings           `PsSettings`
status             what the leader shows: `PsStatus` and `PsEvent`
opened_job         `OpenedJob`: what exists once the first worker has come
worker_desk        requests of workers: shards, evaluations, checkpoints; those that have to wait
pending            what the leader's owner has asked for and is told about: checkpoints, servers, a digest
checkpoint_clock   when the next checkpoint is due
server_fleet       the servers that should exist: how many, of how many cores; a server of c cores is c processes
server_manager     server processes as the leader sees them: start, connect, are heard, fall silent, end
server_processes   starts and ends processes, and notices their ends
balance            hot and slow servers: what to do about them, and the evidence
"""
