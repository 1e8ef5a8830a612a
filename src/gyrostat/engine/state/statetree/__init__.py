"""Training state as a tree: plain values and tensors, taken apart and put together without a lost bit.

A state is made of None, booleans, numbers, strings, bytes, lists, tuples, dicts, sets, tensors, NumPy arrays
and scalars, and torch's dtypes, devices and sizes. `flatten` (flatten.py) separates it into a JSON-able
skeleton (skeleton.py) and a list of tensors; `unflatten` (unflatten.py) is its exact inverse. Checkpoints
store the two apart; `encode` and `decode` (wire.py) join them in one message. `leaves` walks a state by name,
for digests. Nothing here ever reads a pickle, and nothing read is ever executed.

What comes back is equal in type and bits, with these exceptions: a defaultdict becomes a dict, a Parameter a
Tensor, and tensors come back on the CPU. Strides are kept where a tensor is dense (channels_last); else it
comes back contiguous. Tensors that were one memory (tied parameters) are stored once and are one tensor
again. Other aliases, such as one list in two places, become two.
"""

from gyrostat.core.errors import MalformedState
from gyrostat.engine.state.statetree.flatten import canonical_node, flatten, leaves
from gyrostat.engine.state.statetree.skeleton import Flat, Node, Skeleton, TensorSpec
from gyrostat.engine.state.statetree.unflatten import allocate, unflatten
from gyrostat.engine.state.statetree.wire import decode, encode

__all__ = [
    "Flat",
    "MalformedState",
    "Node",
    "Skeleton",
    "TensorSpec",
    "allocate",
    "canonical_node",
    "decode",
    "encode",
    "flatten",
    "leaves",
    "unflatten",
]
