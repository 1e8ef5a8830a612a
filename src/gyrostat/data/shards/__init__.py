"""Dynamic shards: far more ranges of samples than workers, handed out on request, each sample exactly once per epoch.

    layout.py     how samples, or files of samples, are cut into shards
    messages.py   what workers ask and are answered: plain values that can travel
    queues.py     TODO and DOING: who has what, what is done, what goes back. Pure: no I/O, and time is an argument
    speed.py      who is slow, and how much of a shard he gets
    loop.py       `gyrostat.shards` and `gyrostat.batch_end`: the layer for any framework's loop, in one process
    saves.py      the directory in which that layer keeps queues and parameters together

`../shard_loader.py` is the same for a job of virtual workers. Nothing here imports torch.
"""
