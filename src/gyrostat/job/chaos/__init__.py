"""Injects random faults into a user's job, and compares its result with that of an undisturbed run.

plan         which faults, and when: a function of a seed; pure
runner       runs the job repeatedly under faults
job_run      one run of the job, and the injection of faults
target       where the job runs: the interface, and processes that are restarted
run_target   a job of `gyrostat run`, with or without agents and an etcd; that of a cluster is `local.chaos_target`
processes    all processes of a run: found, killed, stopped, continued
inside       in the worker: records what the job reports
record       the records, and the run that they add up to
verdict      compares runs, and reports; pure
"""
