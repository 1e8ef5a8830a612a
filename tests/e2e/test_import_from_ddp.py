"""A plain DDP run that saved itself moves over to gyrostat in the middle, and ends with the bits of DDP alone.

Two processes: with more, DDP itself changes bits when it starts anew, for its first step has another bucket layout. No dropout:
a torch.save'd checkpoint holds no random streams.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from typer.testing import CliRunner

from gyrostat.cli.checkpoint import app
from gyrostat.core.job import CheckpointPolicy
from tests.conftest import Launch

MODEL = """
    import torch
    from torch import nn

    SEED = 5

    def build():
        torch.manual_seed(SEED)
        model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)

    def samples():
        generator = torch.Generator().manual_seed(1)
        inputs = torch.randn(52, 6, generator=generator)
        return torch.utils.data.TensorDataset(inputs, torch.randint(3, (52,), generator=generator))
"""

DDP = """
    import sys

    import torch
    import torch.distributed as dist
    from model import SEED, build, nn, samples
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler

    import gyrostat

    rank, epochs, store, target = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    model, optimizer, schedule = build()
    ddp = DistributedDataParallel(model)
    sampler = DistributedSampler(samples(), seed=SEED)
    loader = DataLoader(samples(), batch_size=4, sampler=sampler)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            nn.functional.cross_entropy(ddp(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        schedule.step()
    if rank == 0:
        state = {"model": ddp.state_dict(), "optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()}
        torch.save(state | {"epoch": epochs}, target)
        print(gyrostat.digest(model=model, optimizer=optimizer, schedule=schedule))
    dist.barrier()
    dist.destroy_process_group()
"""

GYROSTAT = """
    from model import SEED, build, nn, samples

    import gyrostat

    job = gyrostat.init(seed=SEED)
    model, optimizer, schedule = build()
    loader = job.dataloader(samples(), batch_size=4, shuffle=True)
    job.track(model=model, optimizer=optimizer, schedule=schedule)
    for epoch in job.epochs(4):
        for step in job.steps(loader):
            for x, y in step:
                step.backward(nn.functional.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
        schedule.step()
"""


def run_ddp(script: Path, epochs: int, directory: Path) -> str:
    """Plain DDP on two processes; what rank 0 printed. Its checkpoint is `ddp-EPOCHS.pt`."""
    command = [sys.executable, str(script)]
    rest = [str(epochs), str(directory / f"store-{epochs}"), str(directory / f"ddp-{epochs}.pt")]
    ranks = [
        subprocess.Popen([*command, str(rank), *rest], stdout=subprocess.PIPE, text=True) for rank in (0, 1)
    ]
    outputs = [rank.communicate()[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    return outputs[0].strip()


def test_a_ddp_run_goes_on_under_gyrostat(launch: Launch, tmp_path: Path) -> None:
    launch.script(MODEL).rename(tmp_path / "model.py")
    ddp = launch.script(DDP)
    whole = run_ddp(ddp, 4, tmp_path)
    run_ddp(ddp, 2, tmp_path)

    arguments = ["import", tmp_path / "ddp-2.pt", tmp_path / "new", "--epoch", "2", "--step", "14"]
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    policy = CheckpointPolicy(directory=str(tmp_path / "new"))
    rest = launch(GYROSTAT, virtual_workers=2, workers=1, checkpoint=policy)
    assert rest.first_step == 14
    assert rest.steps == 28
    assert rest.digest == whole
