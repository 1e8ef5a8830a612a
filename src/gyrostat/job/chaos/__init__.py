"""Injects random faults into a user's job, and compares its result with that of an undisturbed run.

plan      which faults, and when: a function of a seed; pure
runner    runs the job repeatedly under faults
job_run   one run of the job: its processes, and the injection of faults
victims   the worker processes of a run: kill, stop, continue
inside    in the worker: records what the job reports
record    the records, and the run that they add up to
verdict   compares runs, and reports; pure
"""
