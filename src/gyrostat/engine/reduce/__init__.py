"""Adding gradients over all virtual workers in an order that knows nothing about processes.

`base.py` is the interface, `ddp.py` the order of unmodified DDP over gloo. `buckets.py` says which parameters share a
bucket, `gloo_order.py` how gloo cuts a bucket into chunks and in which order it adds, `ring.py` does that addition across
workers. `gradients.py` stands in front: one tracked module, its `.grad`s and which of them take part.
"""
