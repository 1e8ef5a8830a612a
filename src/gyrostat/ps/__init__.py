"""Parameter servers: tables of rows and dense parameters that asynchronous workers share, on servers that come and go.

A job has a fixed number V of slots, which are to servers what virtual workers are to devices: a row belongs to the slot its id
hashes to, a dense tensor is cut into V pieces, and every server process owns some of the slots. The map from slots to
servers has a version and changes while training goes on.

    store       rows, dense pieces and optimizers of the slots of one process, in NumPy; which updates they have applied
    protocol    who owns which slot, exactly once, migration, checkpoints, recovery: state machines without I/O

    wire, server, client, control, script: the processes. Each package imports only those above it.
"""
