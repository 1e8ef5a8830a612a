"""`gyrostat.servers` in one process: what loops, steps, evaluations and misuse mean."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

import gyrostat
from gyrostat.core.errors import Misuse, NotYet, Refused, UsageError
from gyrostat.engine.script.job import Job
from gyrostat.optim import SGD, Adam, RowAdagrad
from gyrostat.ps.client.local import LocalServers
from gyrostat.ps.client.port import Pull, PulledValues, WholeUpdate
from gyrostat.ps.script.servers import JobServers
from gyrostat.ps.script.table import ServerTable
from gyrostat.ps.store.hashing import keys_of
from tests.ps.script_jobs import IDS, SAMPLES, clicks, fresh_job, train

BATCHES = 10  # of 32 samples


def test_every_batch_is_trained_once_per_epoch() -> None:
    trained = train(None)
    assert sorted(trained.seen) == [(epoch, batch) for epoch in range(2) for batch in range(BATCHES)]
    assert trained.steps == [BATCHES, 2 * BATCHES]
    assert trained.seen[:BATCHES] != sorted(trained.seen[:BATCHES])  # shards come in random order
    assert trained.evaluations[1] < trained.evaluations[0] < 0.7


def test_a_run_is_repeated_bit_by_bit() -> None:
    assert train(None).digest == train(None).digest != train(None, epochs=1).digest


@pytest.mark.parametrize("virtual_workers", [1, 2, 3])
def test_ordered_batches_come_in_order_and_steps_are_counted(virtual_workers: int) -> None:
    trained = train(0, virtual_workers)
    assert trained.seen == [(epoch, batch) for epoch in range(2) for batch in range(BATCHES)]
    steps = -(-BATCHES // virtual_workers)
    assert trained.steps == [steps, 2 * steps]
    assert train(0, virtual_workers).digest == trained.digest
    # One worker reports a batch before it gets the next one: the bound makes no difference.
    assert train(2, virtual_workers).digest == trained.digest


def test_one_exchange_per_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the second batch on, push and pull are one exchange; after each shard what waits is pushed."""
    made: list[tuple[bool, int, int]] = []
    kept = LocalServers.exchange

    def counted(self: LocalServers, push: WholeUpdate | None, pull: Pull) -> PulledValues:
        made.append((push is not None, len(pull.rows), len(pull.dense)))
        return kept(self, push, pull)

    monkeypatch.setattr(LocalServers, "exchange", counted)
    train(None, epochs=1)
    training = made[: made.index((False, 0, 1), 1)]  # the loop ends with a pull of the dense part alone
    first = [(False, 0, 1), (False, 1, 0)]  # the table's ids are not foreseen yet
    shards = [4, 4, 2]
    assert training[:2] == first
    pushes = sum(push for push, _, _ in training)
    assert pushes == BATCHES
    # One exchange per batch, one more at the start, and one per shard for the last push.
    assert len(training) == BATCHES + 1 + len(shards)


def test_tables_are_called_with_any_shape_and_tensor() -> None:
    with fresh_job() as job:
        servers = gyrostat.servers(job)
        items = servers.table("items", width=3, optimizer=SGD(lr=1.0))
        for step in job.steps(job.shards(clicks(64), batch_size=64, shard_size=64)):
            for ids, _ in step:
                rows = items(ids)
                assert rows.shape == (*ids.shape, 3)
                initial = torch.from_numpy(items.spec.initial(keys_of(ids.numpy().reshape(-1), "items")))
                assert torch.equal(rows, initial.view(rows.shape))
                assert torch.equal(items(ids[:, 1]), rows[:, 1])
                assert torch.equal(items(ids + 1000)[0, 0], items(ids[0, 0] + 1000))
                assert torch.equal(items.bag(ids), rows.sum(1))
                assert torch.allclose(items.bag(ids, mode="mean"), rows.mean(1))
                offsets = torch.tensor([0, 2])
                assert torch.equal(items.bag(ids[0], offsets)[1], rows[0, 2])
                # Gradients of all calls are added: 1 from each of these two.
                step.backward(items(ids[0, :1]).sum() + items(ids[0, :1].clone()).sum())
        before, key = initial.view(rows.shape)[0, 0], keys_of(ids[0, :1].numpy(), "items")
        loops = job.loops
        pulled = loops._parts.servers.exchange(None, Pull({0: key})).rows[0]  # type: ignore[attr-defined]
        assert np.array_equal(pulled[0], before.numpy() - 2)


def test_modules_see_the_servers_values_and_gradients_may_be_clipped() -> None:
    with fresh_job() as job:
        servers = gyrostat.servers(job)
        model = nn.Linear(3, 1, bias=False)
        with torch.no_grad():
            model.weight.copy_(torch.tensor([[1.0, 2.0, 3.0]]))
        servers.track(model=model, optimizer=SGD(lr=0.5))
        seen = []
        for step in job.steps(job.shards(clicks(96), batch_size=32, shard_size=32)):
            for ids, _ in step:
                seen.append(model.weight.tolist()[0])
                step.backward(model(torch.ones(len(ids), 3)).mean() * 10)
                nn.utils.clip_grad_value_(model.parameters(), 1.0)
        assert seen == [[1.0, 2.0, 3.0], [0.5, 1.5, 2.5], [0.0, 1.0, 2.0]]
        assert model.weight.tolist()[0] == [-0.5, 0.5, 1.5]  # after the loop: with the last update


_L = nn.Linear(1, 1)
_TORCH: SGD = torch.optim.SGD(_L.parameters(), lr=0.1)  # type: ignore[assignment]
Case = Callable[[Job, JobServers], object]


def _steps(job: Job) -> object:
    return next(iter(job.steps(job.shards(clicks(64), batch_size=32, shard_size=32))))


def _broken(job: Job) -> None:
    for _ in job.steps(job.shards(clicks(64), batch_size=32, shard_size=32)):
        break
    job.evaluate(job.dataloader(clicks(64), batch_size=32), len)


def _twice(job: Job) -> None:
    for _ in range(2):
        for step in job.steps(job.shards(clicks(64), batch_size=32, shard_size=32)):
            for ids, _ in step:
                step.backward(torch.ones(len(ids), requires_grad=True).sum())


def _evaluate_inside(job: Job) -> None:
    for _ in job.steps(job.shards(clicks(64), batch_size=32, shard_size=32)):
        job.evaluate(job.dataloader(clicks(64), batch_size=32), len)


def _own_optimizer(job: Job) -> None:
    parameter = nn.Parameter(torch.ones(1))
    parameter.grad = torch.ones(1)
    torch.optim.SGD([parameter], lr=0.1).step()


def _no_backward(job: Job) -> None:
    for step in job.steps(job.shards(clicks(64), batch_size=32, shard_size=32)):
        for _ in step:
            pass


def _other_data(job: Job) -> None:
    job.shards(clicks(64), batch_size=32, shard_size=32)
    job.shards(clicks(96), batch_size=32, shard_size=32)


def _late_table(job: Job, servers: JobServers) -> None:
    _steps(job)
    servers.table("late", width=1, optimizer=SGD(lr=1.0))


@pytest.mark.parametrize(
    ("error", "message", "case"),
    [
        (Misuse, "use servers.track", lambda job, _: job.track(model=nn.Linear(1, 1))),
        (Misuse, "job.state and job.tracked", lambda job, _: job.state),
        (Misuse, "called twice", lambda job, _: gyrostat.servers(job)),
        (UsageError, "needs a loader of job.shards", lambda job, _: job.steps(job.dataloader(clicks(64)))),
        (UsageError, "has no meaning with servers", lambda job, _: job.steps(_shards(job), limit=3)),
        (UsageError, "multiple of batch_size 32", lambda job, _: job.shards(clicks(), 32, shard_size=40)),
        (UsageError, "leave it out", lambda job, _: _shards(job, drop_last=True)),
        (NotYet, "num_workers=2", lambda job, _: _shards(job, num_workers=2)),
        (UsageError, "with other data than before", lambda job, _: _other_data(job)),
        (Misuse, "make its loader first", lambda job, _: job.evaluate(job.dataloader(clicks(64)), len)),
        (Misuse, "inside job.steps", lambda job, _: _evaluate_inside(job)),
        (Misuse, "a `break`", lambda job, _: _broken(job)),
        (Misuse, "a second job.steps loop over epoch 0", lambda job, _: _twice(job)),
        (Misuse, "without step.backward", lambda job, _: _no_backward(job)),
        (Misuse, "parameters are updated there", lambda job, _: _own_optimizer(job)),
        (Misuse, "before training begins", _late_table),
        (UsageError, "two tables have the name", lambda _, servers: _table(servers, "items")),
        (UsageError, "letters, digits", lambda _, servers: _table(servers, "a b")),
        (UsageError, "integer ids, got torch.float32", lambda _, servers: _table(servers)(torch.ones(1))),
        (UsageError, "bags are 2-dimensional", lambda _, servers: _table(servers).bag(torch.ones(1).long())),
        (UsageError, "torch.optim.SGD", lambda _, servers: servers.track(model=_L, optimizer=_TORCH)),
        (Refused, "use Adagrad", lambda _, servers: servers.track(model=_L, optimizer=RowAdagrad(lr=1.0))),
        (Refused, "running statistics", lambda _, servers: _track(servers, nn.BatchNorm1d(2))),
        (Refused, "float32 on the CPU", lambda _, servers: _track(servers, nn.Linear(1, 1).double())),
        (Misuse, "no parameters", lambda _, servers: _track(servers, nn.ReLU())),
    ],
)
def test_misuse_is_refused(error: type[Exception], message: str, case: Case) -> None:
    with fresh_job() as job:
        servers = gyrostat.servers(job)
        servers.table("items", width=2, optimizer=SGD(lr=1.0))
        with pytest.raises(error, match=message):
            case(job, servers)


def _shards(job: Job, **options: object) -> object:
    return job.shards(clicks(64), batch_size=32, shard_size=32, **options)  # type: ignore[arg-type]


def _table(servers: JobServers, name: str = "others") -> ServerTable:
    return servers.table(name, width=2, optimizer=SGD(lr=1.0))


def _track(servers: JobServers, module: nn.Module) -> None:
    servers.track(model=module, optimizer=Adam(lr=0.1))


def test_virtual_workers_need_an_order() -> None:
    with fresh_job(virtual_workers=2) as job, pytest.raises(UsageError, match="need steps"):
        gyrostat.servers(job)
    with fresh_job() as job, pytest.raises(UsageError, match="got -1"):
        gyrostat.servers(job, staleness=-1)
    with fresh_job() as job:
        job.track(model=nn.Linear(1, 1))
        with pytest.raises(Misuse, match=r"directly after gyrostat\.init"):
            gyrostat.servers(job)


def test_buffers_that_change_are_refused() -> None:
    class Counting(nn.Linear):
        def __init__(self) -> None:
            super().__init__(1, 1)
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert isinstance(self.count, torch.Tensor)
            self.count += 1
            return super().forward(x)

    with fresh_job() as job:
        servers = gyrostat.servers(job)
        model = Counting()
        servers.track(model=model, optimizer=SGD(lr=0.1))

        def train_once() -> None:
            for step in job.steps(job.shards(clicks(64), batch_size=32, shard_size=32)):
                for _ in step:
                    step.backward(model(torch.ones(1, 1)).sum())

        with pytest.raises(Refused, match=r"buffer model.count has changed"):
            train_once()


def test_the_samples_of_an_epoch_are_a_permutation() -> None:
    for staleness in (None, 0):
        with fresh_job() as job:
            servers = gyrostat.servers(job, staleness=staleness)
            servers.table("items", width=1, optimizer=SGD(lr=1.0))
            ids: list[int] = []
            data = torch.utils.data.TensorDataset(torch.arange(SAMPLES))
            for epoch in job.epochs(2):
                for step in job.steps(job.shards(data, batch_size=32, shard_size=96)):
                    for (samples,) in step:
                        ids += samples.tolist()
                        step.backward(torch.ones(1, requires_grad=True).sum())
                assert sorted(ids[epoch * SAMPLES :]) == list(range(SAMPLES))
            assert ids[:SAMPLES] != ids[SAMPLES:]
    assert IDS < SAMPLES
