"""Training state as a tree of plain values and tensors, flattened and unflattened exactly.

A state consists of None, booleans, numbers, strings, bytes, lists, tuples, dicts, sets, tensors, NumPy arrays
and scalars, and torch's dtypes, devices and sizes. `flatten` (flatten.py) separates it into a JSON-able
skeleton (skeleton.py) and a list of tensors; `unflatten` (unflatten.py) is its exact inverse. Checkpoints
store the two apart; `encode` and `decode` (wire.py) join them in one message. `leaves` walks a state by name,
for digests. Nothing here reads a pickle, and nothing that is read is executed.

The result is equal in type and bits, with these exceptions: a defaultdict becomes a dict, a Parameter a
Tensor, and tensors are on the CPU. Strides are kept where a tensor is dense (channels_last); otherwise it becomes
contiguous. Tensors that share one memory (tied parameters) are stored once and become one tensor. Other aliases, such as
one list in two places, become two.
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
