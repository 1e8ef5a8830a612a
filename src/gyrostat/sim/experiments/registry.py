"""Experiments by name. Each is a module of this package with `run(context) -> ExperimentFinding`, imported on demand."""

from __future__ import annotations

import importlib
from collections.abc import Mapping

from gyrostat.core.errors import UsageError
from gyrostat.sim.experiments.finding import ExperimentContext, ExperimentFinding

EXPERIMENTS: Mapping[str, str] = {
    "elastic-tiresias": "EDL, Table 4: Elastic-Tiresias against Tiresias on the Philly trace",
    "elastic-tiresias-why": "The same with a quarter of the jobs: what load, N, models, affinity and long jobs change",
    "edl-16-jobs": "EDL, Figure 11: 16 jobs on 32 devices, static against elastic",
    "edl-transient": "EDL, Figure 10b: transient devices, four ways to use them",
    "easyscale-trace": "EasyScale, Figure 14: homogeneous and heterogeneous elasticity against YARN-CS",
    "easyscale-serving": "EasyScale, Figure 16: training beside a serving load, time to yield and to refill",
    "virtualflow-20-jobs": "VirtualFlow, Figures 11 and 12: 20 jobs, fair shares against static priority",
    "virtualflow-3-jobs": "VirtualFlow, Figure 10: 3 jobs, fair shares against static priority",
    "virtualflow-solver": "VirtualFlow, Figures 13 and 14: the solver on the configurations of Table 4",
    "gavel-mixed": "VirtualFlow, Figure 15: Gavel with and without mixed allocations",
    "hived-sharing": "HiveD, Figure 5: private, quota and cells under YARN-CS, Gandiva and Tiresias",
    "hived-load": "HiveD, Figures 6 and 7: twenty days at the original and at a higher load",
    "hived-leaving": "HiveD, Figure 7: tenants that suffer leave",
    "hived-reshaped": "HiveD, Figure 8: affinity requirements reshaped",
    "hived-soft": "HiveD, Figure 9: 25, 50 and 75 % of the larger jobs with soft affinity",
    "hived-binding": "HiveD, Figure 10: dynamic against static binding",
    "hived-levels": "HiveD, Figure 11: cells of several levels against whole machines",
    "hived-traces": "HiveD on ITP's and Alibaba's traces, divided among tenants by rule",
}


def run(name: str, context: ExperimentContext) -> ExperimentFinding:
    if name not in EXPERIMENTS:
        raise UsageError(f"there is no experiment {name!r}; there are {', '.join(EXPERIMENTS)}")
    module = importlib.import_module(f"gyrostat.sim.experiments.{name.replace('-', '_')}")
    finding: ExperimentFinding = module.run(context)
    return finding
