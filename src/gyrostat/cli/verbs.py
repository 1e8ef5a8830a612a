"""The verbs: where each is defined and what `gyrostat --help` says about it.

`VerbGroup` imports a verb's module when the verb is invoked or when its options are completed. Help and completion of verb
names read only the table below.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup


class Panel(StrEnum):
    """The sections of `gyrostat --help`."""

    JOB = "One job"
    CLUSTER = "Cluster"
    PROOF = "Proof and diagnosis"
    PLANNING = "Simulator and planning"
    ADMINISTRATION = "Administration"


@dataclass(frozen=True)
class Verb:
    module: str
    """The module in `gyrostat.cli` whose `register` adds the verb to an app."""
    panel: Panel
    help: str
    """One line."""
    hidden: bool = False


VERBS: Mapping[str, Verb] = {
    "run": Verb("run", Panel.JOB, "Run a training job on this machine, or on several nodes."),
    "status": Verb("running", Panel.JOB, "Show the status of jobs, and why a queued job waits."),
    "scale": Verb("scale", Panel.JOB, "Change the number of workers or servers of a running job."),
    "migrate": Verb("running", Panel.JOB, "Replace workers of a running job by new ones."),
    "profile": Verb("running", Panel.JOB, "Measure the throughput of a running job by number of workers."),
    "stop": Verb("running", Panel.JOB, "Checkpoint a running job and end it."),
    "checkpoint": Verb("checkpoint", Panel.JOB, "Show, verify, export, import and request checkpoints."),
    "up": Verb("up", Panel.CLUSTER, "Start a cluster on this machine."),
    "down": Verb("down", Panel.CLUSTER, "Stop the cluster on this machine."),
    "submit": Verb("submit", Panel.CLUSTER, "Submit a job to the cluster."),
    "jobs": Verb("jobs", Panel.CLUSTER, "List the jobs of the cluster."),
    "logs": Verb("logs", Panel.CLUSTER, "Show the output of a job's workers."),
    "cancel": Verb("steer", Panel.CLUSTER, "Cancel a job."),
    "pause": Verb("steer", Panel.CLUSTER, "Checkpoint a job and release its devices."),
    "resume": Verb("steer", Panel.CLUSTER, "Queue a paused job again."),
    "top": Verb("top", Panel.CLUSTER, "Watch devices, jobs and queues."),
    "events": Verb("events", Panel.CLUSTER, "List every decision of the scheduler, with its reason."),
    "verify": Verb("verify", Panel.PROOF, "Prove that a script gives the same bits on every placement."),
    "chaos": Verb("chaos", Panel.PROOF, "Inject failures into a job and compare its result."),
    "scan": Verb("scan", Panel.PROOF, "Measure the cost of heterogeneous determinism for a script."),
    "probe": Verb("probe", Panel.PROOF, "Check whether two machines compute the same bits."),
    "replay": Verb("replay", Panel.PROOF, "Replay recorded scheduling decisions and compare them."),
    "replay-async": Verb(
        "replay_async", Panel.PROOF, "Repeat a recorded asynchronous job in one process, with equal bits."
    ),
    "simulate": Verb("simulate", Panel.PLANNING, "Run the scheduler on a trace, in virtual time."),
    "experiment": Verb("experiment", Panel.PLANNING, "Reproduce experiments of published papers."),
    "plan": Verb("plan", Panel.PLANNING, "Split virtual workers over devices of several types."),
    "profile-device": Verb(
        "profile_device", Panel.PLANNING, "Measure the throughput of a script by batch size on this device."
    ),
    "reserve": Verb("reserve", Panel.ADMINISTRATION, "Reserve devices for a serving load."),
    "release": Verb("reserve", Panel.ADMINISTRATION, "Return reserved devices to the cluster."),
    "cells": Verb("cells", Panel.ADMINISTRATION, "Check and show the cell file of a shared cluster."),
    "token": Verb("token", Panel.ADMINISTRATION, "Manage the access tokens of a cluster."),
    "operator": Verb("later", Panel.ADMINISTRATION, "(later) Run the Kubernetes operator.", hidden=True),
    "extender": Verb(
        "later", Panel.ADMINISTRATION, "(later) Run the Kubernetes scheduler extender.", hidden=True
    ),
}
"""In the order of help."""


class VerbGroup(TyperGroup):
    """All verbs as commands without parameters; the one that is invoked is replaced by the command itself."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = {
            name: TyperCommand(name, short_help=verb.help, rich_help_panel=verb.panel, hidden=verb.hidden)
            for name, verb in VERBS.items()
        }

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        return name, command if name is None else load_verb(name), rest


def load_verb(name: str) -> Any:
    """The command of a verb, with its parameters. Imports its module."""
    app = typer.Typer(pretty_exceptions_enable=False, rich_markup_mode="rich")
    import_module(f"gyrostat.cli.{VERBS[name].module}").register(app)
    return typer.main.get_group(app).commands[name]
