"""What a script's model costs under `heterogeneous` determinism, measured on this machine.

`scanner` runs the script under both levels at once, in two workers that take turns (`turns`), so that whatever else the machine
does falls on both. `inside` watches it within a worker, `verdict` adds up and decides whether the job may mix device types.
"""
