"""The parameters of the slots that one process owns, and which updates they have applied. NumPy only, one thread, no I/O.

hashing      ids → keys → slots; the initial values of a row
key_index    keys → row numbers: an open-addressing hash table in segments, each of which belongs to one slot
rows         `RowTable`: the rows of a sparse table, with optimizer state, entry threshold and expiry
dense        `DensePieces`: a dense tensor, cut into one piece per slot
optimizers   kernels over (rows, state, gradients); `schedules`: learning rates by the number of updates
coalesce     gradients of the same id, summed in a fixed order
ledger       which updates every slot has applied
update       `Update`: the gradients of one batch
pending_steps    of ordered jobs: updates that wait for the other batches of their step
slot_store   `SlotStore`: all of this, for the slots of one process
slot_state   the state of one slot as named arrays, for checkpoints (safetensors) and for its way to another server
"""
