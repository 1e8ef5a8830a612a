"""Dynamic shards: far more ranges of samples than workers, handed out on request, each sample exactly once per epoch.

    layout.py     how samples, or files of samples, are cut into shards
    messages.py   requests of workers and their replies: plain values that can be sent
    queues.py     TODO and DOING: which worker holds which samples, what is done, what is returned. Pure; time is an argument
    speed.py      measures workers, and gives stragglers smaller shards
    loop.py       `gyrostat.shards` and `gyrostat.batch_end`: the layer for any framework's loop, in one process
    saves.py      the directory in which that layer keeps queues and parameters together

`../shard_loader.py` does the same for a job of virtual workers. Nothing here imports torch.
"""
