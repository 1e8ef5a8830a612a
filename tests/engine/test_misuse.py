"""Misuse gets a clear error with exit code 2, in the user's own run: what, the value, what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from gyrostat.core.job import CheckpointPolicy
from tests.conftest import Launch

HEAD = """
import torch, gyrostat
from torch import nn
from torch.utils.data import TensorDataset
"""
SETUP = """
model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = job.dataloader(TensorDataset(torch.randn(12, 4)), batch_size=2)
"""
TRACK = "job.track(model=model, optimizer=optimizer)\n"
LOOP = """
for step in job.steps(loader):
    for (x,) in step:
        step.backward(model(x).sum())
    optimizer.step()
    optimizer.zero_grad()
"""
INIT = "job = gyrostat.init()\n"
START = HEAD + INIT + SETUP

CASES = {
    "init_process_group": (
        HEAD + "torch.distributed.init_process_group('gloo')",
        "the script called torch.distributed.init_process_group; gyrostat brings the workers together itself",
    ),
    "DDP": (
        START + "nn.parallel.DistributedDataParallel(model)",
        "the script called torch.distributed.DistributedDataParallel; gyrostat brings the workers together",
    ),
    "DistributedSampler": (
        START + "torch.utils.data.DistributedSampler(range(9))",
        "the script called torch.distributed.DistributedSampler; gyrostat brings the workers together itself",
    ),
    "a loader iterated": (
        START + TRACK + "list(loader)",
        "a loader of job.dataloader is not iterated itself",
    ),
    "no state_dict": (START + "job.track(model=model, optimizer=optimizer, best=3)", "has no state_dict()"),
    "tracked twice": (START + TRACK + "job.track(model=model)", "twice"),
    "no data": (
        HEAD + INIT + SETUP.replace("batch_size=2", "batch_size=50, drop_last=True") + TRACK + LOOP,
        "virtual workers are left without data: 12 samples",
    ),
    "no step.backward": (
        START + TRACK + LOOP.replace("step.backward(model(x).sum())", "model(x).sum().backward()"),
        "ended without step.backward(loss)",
    ),
    "backward twice": (
        START
        + TRACK
        + LOOP.replace(
            "step.backward(model(x).sum())", "step.backward(model(x).sum()); step.backward(model(x).sum())"
        ),
        "called twice in one micro-batch",
    ),
    "backward outside": (START + TRACK + LOOP + "step.backward(model(x).sum())", "inside the inner loop"),
    "untracked parameters": (
        START + "other = nn.Linear(3, 7)\n"
        "optimizer.add_param_group({'params': list(other.parameters())})\n" + TRACK,
        "shape (7, 3) (group 1, position 0) that belongs to no tracked module",
    ),
    "untracked optimizer": (START + "job.track(model=model)\n" + LOOP, "untracked SGD"),
    "update in the inner loop": (
        START
        + TRACK
        + LOOP.replace("step.backward(model(x).sum())", "step.backward(model(x).sum()); optimizer.step()"),
        "optimizer.step() inside the inner loop",
    ),
    "break from the inner loop": (
        START + TRACK + LOOP.replace("step.backward(model(x).sum())", "step.backward(model(x).sum()); break"),
        "inner loop of step 0 was left before",
    ),
    "break from both loops": (
        START
        + TRACK
        + "for step in job.steps(loader):\n    for (x,) in step:\n        step.backward(model(x).sum())\n"
        "        break\n    break\n",
        "inner loop of step 0 was left before",
    ),
    "step not iterated": (START + TRACK + "for step in job.steps(loader): pass", "step 0 was not iterated"),
    "steps before track": (START + LOOP, "job.steps before job.track"),
    "track after steps": (
        START + TRACK + LOOP + "job.track(again=nn.Linear(2, 2))",
        "after the first job.steps",
    ),
    "foreign loader": (
        START + TRACK + "for step in job.steps(torch.utils.data.DataLoader([1, 2])): pass",
        "made by job.dataloader, got a DataLoader",
    ),
    "accumulate 0": (START + TRACK + "job.steps(loader, accumulate=0)", "accumulate must be"),
    "negative limit": (START + TRACK + "job.steps(loader, limit=-1)", "limit must be"),
    "epochs of 1.5": (START + TRACK + "job.epochs(1.5)", "job.epochs needs a whole number"),
    "interleaved loops": (
        START
        + TRACK
        + "for a, b in zip(job.steps(loader), job.steps(loader)):\n    for (x,) in b: step = b.backward(model(x).sum())\n",
        "loops over steps cannot be interleaved",
    ),
    "mean too early": (
        START
        + TRACK
        + LOOP.replace(
            "step.backward(model(x).sum())", "step.backward(model(x).sum()); job.mean(1.0).item()"
        ),
        "known only after the inner loop",
    ),
    "mean outside": (START + TRACK + LOOP + "job.mean(1.0)", "job.mean only has a meaning inside"),
    "local outside": (START + TRACK + LOOP + "step.local", "step.local only has a meaning inside"),
    "init twice": (HEAD + INIT + INIT, "gyrostat.init was called twice"),
    "negative seed": (HEAD + "gyrostat.init(seed=-1)", "seed must be"),
    "other number of virtual workers": (
        HEAD + "gyrostat.init(virtual_workers=3)",
        "gyrostat.init(virtual_workers=3), the command line --virtual-workers 2",
    ),
    "unknown DDP option": (
        START + "job.track(model=model, ddp={'find_unused': True})",
        "no option 'find_unused'",
    ),
    "DDP option without meaning": (
        START + "job.track(model=model, ddp={'process_group': None})",
        "gyrostat brings the process group",
    ),
    "unused parameter": (
        START.replace("nn.Linear(4, 2)", "nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 2))")
        + TRACK
        + LOOP.replace("model(x)", "model[0](x)"),
        "parameters '1.weight', '1.bias' of 'model' got no gradient in the micro-batch of virtual worker 0",
    ),
    "unfrozen later": (
        START.replace("nn.Linear(4, 2)", "nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 2))")
        + "model[1].requires_grad_(False)\n"
        + TRACK
        + "model[1].requires_grad_(True)\n"
        + LOOP,
        "was frozen at job.track but has a gradient now",
    ),
    "in two modules": (
        START + "job.track(model=model, both=nn.Sequential(model), optimizer=optimizer)",
        "belongs to both tracked modules 'model' and 'both'",
    ),
    "state that cannot be saved": (
        START
        + "class Odd:\n    def state_dict(self): return {'a': {'f': print}}\n    def load_state_dict(self, s): pass\n"
        "job.track(model=model, optimizer=optimizer, odd=Odd())\n" + LOOP,
        "odd.a.f",
    ),
    "SyncBatchNorm": (
        START + "job.track(model=nn.Sequential(nn.SyncBatchNorm(4)))",
        "model.0 is a SyncBatchNorm",
    ),
    "sparse embedding": (START + "job.track(model=nn.Embedding(4, 2, sparse=True))", "sparse gradients"),
    "sparse gradient": (
        HEAD
        + INIT
        + "class M(nn.Module):\n    def __init__(self):\n        super().__init__(); self.w = nn.Parameter(torch.randn(5, 2))\n"
        "    def forward(self, x): return nn.functional.embedding(x, self.w, sparse=True)\n"
        "model = M()\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "loader = job.dataloader(TensorDataset(torch.randint(0, 5, (12,))), batch_size=2)\n" + TRACK + LOOP,
        "parameter 'w' of 'model' has a sparse gradient",
    ),
    "process group": (
        START + "import torch.distributed as dist\n"
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n" + TRACK,
        "the script called torch.distributed.init_process_group",
    ),
    "wrapped in DDP": (
        START + "import torch.distributed as dist\n"
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
        "wrapped = nn.parallel.DistributedDataParallel(model)\ndist.destroy_process_group()\njob.track(model=wrapped)",
        "track the module itself",
    ),
    "collective in forward": (
        START + "import torch.distributed as dist\n"
        "class Sync(nn.Linear):\n    def forward(self, x):\n        dist.all_reduce(x)\n        return x\n"
        "job.track(model=nn.Sequential(Sync(2, 2)))",
        "model.0: forward of Sync calls torch.distributed.all_reduce",
    ),
    "DTensor": (
        START
        + "import torch.distributed as dist\nfrom torch.distributed.tensor import distribute_module, init_device_mesh\n"
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
        "distribute_module(model, init_device_mesh('cpu', (1,)))\ndist.destroy_process_group()\njob.track(model=model)",
        "is a DTensor",
    ),
    "complex parameter": (
        START + "job.track(model=nn.Linear(2, 2, dtype=torch.complex64))",
        "parameter model.weight is complex",
    ),
    "own backward before": (
        START + TRACK + LOOP.replace("step.backward(", "model(x).sum().backward(); step.backward("),
        "has gradients before step.backward(loss)",
    ),
    "parameters added later": (
        START
        + TRACK
        + "other = nn.Linear(2, 1)\noptimizer.add_param_group({'params': list(other.parameters())})\n"
        + LOOP.replace("model(x).sum()", "other(model(x)).sum()"),
        "that belongs to no tracked module",
    ),
    "unfrozen module": (
        START
        + "plain = nn.Linear(2, 1).requires_grad_(False)\noptimizer.add_param_group({'params': list(plain.parameters())})\n"
        "job.track(model=model, plain=plain, optimizer=optimizer)\nplain.requires_grad_(True)\n"
        + LOOP.replace("model(x).sum()", "plain(model(x)).sum()"),
        "whose gradient is not reduced",
    ),
    "buffer that comes later": (
        START + "class Late(nn.Linear):\n    def __init__(self):\n        super().__init__(4, 2)\n"
        "        self.register_buffer('seen', None)\n"
        "    def forward(self, x):\n        self.seen = torch.ones(1)\n        return super().forward(x)\n"
        "model = Late()\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n" + TRACK + LOOP,
        "got or lost a buffer in a micro-batch",
    ),
    "part with a buffer that comes later": (
        START + "class Growing(nn.Linear):\n    def __init__(self):\n        super().__init__(4, 2)\n"
        "        self.register_buffer('seen', torch.zeros(1))\n"
        "    def forward(self, x):\n        self.part = nn.BatchNorm1d(2, affine=False)\n        return super().forward(x)\n"
        "model = Growing()\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n" + TRACK + LOOP,
        "got or lost a buffer in a micro-batch",
    ),
    "checkpoint_dir under run": (HEAD + "gyrostat.init(checkpoint_dir='there')", "--checkpoint-dir DIR"),
    "checkpoint_every alone": (HEAD + "gyrostat.init(checkpoint_every=3)", "needs checkpoint_dir"),
    "lazy parameter": (START + "job.track(model=nn.LazyLinear(2))", "is not initialized"),
    "accumulation without an end": (
        START
        + """
class Endless:
    def __iter__(self):
        return iter(range(3))
model = nn.Linear(1, 1)
job.track(model=model)
loader = job.dataloader(TensorDataset(torch.zeros(3, 1)), sampler=Endless())
for step in job.steps(loader, accumulate=2):
    pass
""",
        "needs to know when data ends",
    ),
    "a sampler that breaks its promise": (
        START
        + """
class Short:
    def __len__(self):
        return 3
    def __iter__(self):
        return iter(range(2))
model = nn.Linear(1, 1)
job.track(model=model)
for step in job.steps(job.dataloader(TensorDataset(torch.zeros(3, 1)), sampler=Short())):
    for (x,) in step:
        step.backward(model(x).sum())
""",
        "ended after 2 batches, fewer than its len()",
    ),
    "batches as they come": (
        START + "job.dataloader(TensorDataset(torch.zeros(3)), num_workers=2, in_order=False)",
        "in_order=False",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_misuse(launch: Launch, name: str) -> None:
    script, says = CASES[name]
    outcome = launch(script, virtual_workers=2, check=False)
    assert outcome.failure is not None
    assert says in str(outcome.failure.traceback)
    assert outcome.exit_code == 2


def test_workers_at_different_places_name_both(launch: Launch) -> None:
    script = (
        START
        + TRACK
        + LOOP
        + "if job.is_main: job.evaluate(loader, len)\nelse:\n    for step in job.steps(loader): pass\n"
    )
    outcome = launch(
        script.replace("pass\n", "[step.backward(model(x).sum()) for (x,) in step]\n"),
        placement=[1, 1],
        check=False,
    )
    assert outcome.failure is not None
    assert "'evaluate'" in str(outcome.failure.traceback)
    assert "worker 1 is at 'compare'" in str(outcome.failure.traceback) or "'reduce'" in str(
        outcome.failure.traceback
    )


def test_replicas_that_differ_are_stopped_naming_the_tensor(launch: Launch) -> None:
    script = START + TRACK + "if not job.is_main: model.bias.data += 1e-3\n" + LOOP
    outcome = launch(script, placement=[1, 1], check=False)
    assert outcome.failure is not None
    assert "workers 0 and 1 do not hold the same state at step 0" in str(outcome.failure.traceback)
    assert "model.bias differs" in str(outcome.failure.traceback)


def test_replicas_that_come_apart_are_stopped_at_the_end(launch: Launch) -> None:
    script = START + TRACK + LOOP + "if not job.is_main: optimizer.param_groups[0]['lr'] = 0.2\n"
    outcome = launch(script, placement=[1, 1], check=False)
    assert outcome.failure is not None
    assert "optimizer.param_groups.0.lr differs" in str(outcome.failure.traceback)


def test_saving_on_one_worker_only_names_both_places(launch: Launch, tmp_path: Path) -> None:
    """Also where messages are long and batch-norm's buffers travel at the same time."""
    script = START.replace(
        "nn.Linear(4, 2)", "nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))"
    )
    script += TRACK + LOOP + "    if job.is_main: job.save()\n"
    policy = CheckpointPolicy(directory=str(tmp_path / "checkpoints"))
    outcome = launch(script, placement=[1, 1], checkpoint=policy, check=False)
    assert outcome.failure is not None
    assert "'contexts'" in str(outcome.failure.traceback)


def test_shared_values_that_differ_are_noticed(launch: Launch) -> None:
    outcome = launch(
        START + TRACK + LOOP + "job.state['main'] = job.is_main\n", placement=[1, 1], check=False
    )
    assert outcome.failure is not None
    assert "state.main differs" in str(outcome.failure.traceback)
