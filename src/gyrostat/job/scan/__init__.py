"""The cost of a script's model under `heterogeneous` determinism, measured on this machine.

`scanner` runs the script under both levels at once, in two workers that take turns (`turns`), so that other load on the machine
affects both. `inside` measures in the worker; `verdict` evaluates, and decides whether the job may mix device types.
"""
