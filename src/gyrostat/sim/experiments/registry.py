"""Experiments by name. Each is a module of this package with `run(context) -> Finding`; imported when asked for."""

from __future__ import annotations

import importlib
from collections.abc import Mapping

from gyrostat.core.errors import UsageError
from gyrostat.sim.experiments.finding import Context, Finding

EXPERIMENTS: Mapping[str, str] = {
    "elastic-tiresias": "EDL, Table 4: Elastic-Tiresias against Tiresias on the Philly trace",
    "edl-16-jobs": "EDL, Figure 11: 16 jobs on 32 devices, static against elastic",
    "edl-transient": "EDL, Figure 10b: transient devices, four ways to use them",
    "easyscale-trace": "EasyScale, Figure 14: homogeneous and heterogeneous elasticity against YARN-CS",
    "easyscale-serving": "EasyScale, Figure 16: training beside a serving load, time to yield and to refill",
    "virtualflow-20-jobs": "VirtualFlow, Figures 11 and 12: 20 jobs, fair shares against static priority",
    "virtualflow-3-jobs": "VirtualFlow, Figure 10: 3 jobs, fair shares against static priority",
    "virtualflow-solver": "VirtualFlow, Figures 13 and 14: the solver on the configurations of Table 4",
    "gavel-mixed": "VirtualFlow, Figure 15: Gavel with and without mixed allocations",
}


def run(name: str, context: Context) -> Finding:
    if name not in EXPERIMENTS:
        raise UsageError(f"there is no experiment {name!r}; there are {', '.join(EXPERIMENTS)}")
    module = importlib.import_module(f"gyrostat.sim.experiments.{name.replace('-', '_')}")
    finding: Finding = module.run(context)
    return finding
