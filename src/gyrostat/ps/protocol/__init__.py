"""Who owns which slot, and exactly once: state machines without I/O. Events in, instructions out; time is an argument.

    exchange       what a worker and a server say to one another about rows and gradients
    messages       what the coordinator and servers say to one another
    slot_map       slots → servers, with a version; which slots should move
    slot_server    one server process: admits, applies, holds back and forwards; gives slots away and takes them
    checkpoint     a checkpoint: the queues and a file per slot; one in the making
    data_spec      the training data, as shard queues
    evaluation     parts of a dataset that is evaluated, and their results
    coordinator    all servers and the shard queues of a job: assignment, moves, checkpoints, recovery
    delivery       the worker's side: an exchange with all slots, repeated until each has answered

**Exactly once.** An update is (epoch, first sample // batch size). Every slot has a bitmap of those it has applied and
refuses them. A worker reports a shard when all slots have acknowledged its batches. A shard that was returned is handed
out again: its batches that all slots have are skipped; those that some have are trained again, and refused there.

**Order.** With bounded staleness a slot keeps the gradients of a step (N consecutive batches) until all are known to be in
every slot: the leader counts a step as committed when all its batches are reported, hands out a batch of step s only when the
steps before s - k are committed, and every request carries the number of committed steps, which slots then apply. So no slot
applies a step that another may still lack, and a batch that is trained again sees what it saw before.

**Terms.** Parameters go back only together with the queues, under a new term. Requests and reports of another term are
refused, so that nothing of an abandoned past, or of a server that was given up and lives, reaches the new one.

**A slot moves**: the source freezes it and sends a copy; the target reports its arrival; the coordinator changes the
map; the target owns it and the source drops it. A request for several slots is served for those that do not move; the rest is
sent again. Requests for frozen slots alone wait at the source, and are then answered `MOVED`: the worker sends them to the
target.

**A checkpoint** takes the queues first, then every slot in its own time with its bitmap: what the queues count as
reported is in every slot.

**A server is lost.** `exact`: all slots and the queues go back to the last checkpoint. `partial`: only the lost slots
and the queues do; batches that the lost slots miss are trained again and refused elsewhere. `replica`: every slot has a
mirror on another server, which has every update before it is acknowledged; the mirror becomes the owner, and nothing
goes back.

`tests/ps/test_exactly_once.py` runs these machines in random schedules with deaths at any instant.
"""
