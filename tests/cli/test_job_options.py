"""The options of a job are the same for `gyrostat run`, `gyrostat submit` and a job file, unless there is a reason."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gyrostat.cli.run import run
from gyrostat.cli.submit import make_spec, submit
from gyrostat.cluster.job_spec import JobSpec, read_spec
from gyrostat.core.errors import UsageError
from gyrostat.core.job import RecoveryMode
from gyrostat.job.diagnostics.stragglers import Reaction, StragglerPolicy
from gyrostat.job.diagnostics.watchdog import Action, WatchdogPolicy

ONLY_RUN = {
    "placement": "the scheduler decides how many workers there are",
    "schedule": "the scheduler decides when it changes",
    "min_workers": "is --min, which the scheduler sees to",
    "pool": "is --types",
    "paced": "devices are paced by `gyrostat up`",
    "straggler_return": "for --stragglers remove, which is the scheduler's to do",
    "store": "several nodes",
    "nodes": "several nodes",
    "node": "several nodes",
    "listen": "several nodes",
    "token_file": "several nodes",
    "node_timeout": "several nodes",
    "lease": "several nodes",
    "checkpoint_dir": "the cluster keeps checkpoints",
    "resume": "a job of a cluster always resumes",
    "report": "the cluster keeps records: `gyrostat status`, `events`",
    "log_dir": "the cluster keeps output: `gyrostat logs`",
    "trace": "would be written on the cluster's machine",
    "record": "would be written on the cluster's machine",
    "quiet": "output goes to the cluster's logs",
    "verbose": "log records are the daemon's",
    "log_format": "log records are the daemon's",
}
OTHER_NAMES = {"workers": "max"}
"""Options whose field in a job file has another name: the scheduler decides the number of workers, up to this."""
ONLY_SUBMIT_DEFAULTS = {"checkpoint_interval": (0.0, 300.0)}
"""On a cluster nobody watches a job, and its machine may go down."""


def parameters(command: Any) -> dict[str, Any]:
    found = inspect.signature(command).parameters.items()
    return {name: parameter.default for name, parameter in found if name != "context"}


def test_every_other_option_of_run_is_on_submit_and_in_job_files() -> None:
    of_run, of_submit = parameters(run), parameters(submit)
    assert ONLY_RUN.keys() == of_run.keys() - of_submit.keys()
    both = of_run.keys() & of_submit.keys()
    assert {OTHER_NAMES.get(name, name) for name in both} <= set(JobSpec.__struct_fields__)


def test_their_defaults_are_the_same() -> None:
    spec, of_run = JobSpec(script="train.py"), parameters(run)
    both = of_run.keys() & parameters(submit).keys() - {"script", "args", "virtual_workers", "workers"}
    different = {
        name: (of_run[name], getattr(spec, name)) for name in both if of_run[name] != getattr(spec, name)
    }
    assert different == ONLY_SUBMIT_DEFAULTS


def test_they_reach_the_job(tmp_path: Path) -> None:
    given = {"watchdog": 30, "watchdog_action": "end", "heartbeat_timeout": 5, "recovery": "approximate"}
    given |= {"restarts": 7, "poison_limit": 2, "grace": 3, "keep": 9, "checkpoint_interval": 60}
    given |= {"stragglers": "re-place", "straggler_factor": 2.0, "straggler_steps": 20, "straggler_pause": 1}
    spec = make_spec("train.py", (), {"module": None, **given})
    options, failures = spec.training_options(tmp_path), spec.failure_policy()
    assert options.checkpoint is not None
    assert (options.checkpoint.interval_s, options.checkpoint.keep) == (60.0, 9)
    assert options.recovery is RecoveryMode.APPROXIMATE
    assert failures.watchdog == WatchdogPolicy(seconds=30.0, action=Action.END)
    assert (failures.heartbeat_timeout_s, failures.grace_s) == (5.0, 3.0)
    assert (failures.restarts, failures.poison_limit) == (7, 2)
    assert failures.stragglers == StragglerPolicy(
        reaction=Reaction.REPLACE, factor=2.0, steps=20, pause_s=1.0
    )


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("watchdog", 0, "greater than|> 0"),
        ("watchdog", 1e12, "<= "),
        ("heartbeat_timeout", -1, ">= 0"),
        ("restarts", 1001, "<= 1000"),
        ("poison_limit", -1, ">= 0"),
        ("keep", 0, ">= 1"),
        ("straggler_factor", 1, "> 1"),
        ("straggler_steps", 101, "<= 100"),
        ("checkpoint_interval", float("nan"), ">= 0"),
        ("stragglers", "remove", "the scheduler decides which devices a job has"),
        ("recovery", "none", "recovery"),
    ],
)
def test_every_number_has_bounds(field: str, value: object, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        read_spec({"script": "train.py", field: value})


def test_clients_still_import_no_torch() -> None:
    code = "import sys, gyrostat.cluster.client; print('torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "False"
