"""Adds gradients over all virtual workers in an order that does not depend on the number of workers.

base.py          the interface, `Reducer`
gradients.py     one tracked module: its `.grad`s, and which of them take part in a pass; calls a `Reducer`
bucketed.py      what both orders share: buckets, overlap with backward, recovery; memory in `buffer_pool.py`
ddp.py           the order of unmodified DDP over gloo: `buckets.py` assigns parameters to buckets, `gloo_order.py` says
                 how gloo cuts and adds a bucket, `ring.py` does that across workers, `selftest.py` checks it
tree.py          the order of a fixed binary tree (`tree_order.py`), across workers by `tree_exchange.py`
shared_sum.py    both orders where the workers of one machine read one another's gradients
host_copies.py   gradients of a GPU on their way to host memory
hook.py          the tree order as a communication hook for plain DDP
"""
