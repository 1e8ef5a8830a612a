"""HiveD, Figures 6 and 7 (§5.2): twenty days in a cluster of the original load, and in a fuller one."""

from __future__ import annotations

from gyrostat.sim.experiments.finding import Compared, ExperimentContext, ExperimentFinding
from gyrostat.sim.experiments.hived_trace import (
    HIGH,
    NORMAL,
    busy_days,
    compare,
    fragmentation_plot,
    queueing_plot,
    removed,
    tenants_table,
)

SIZES = (("73 machines (279 nodes)", NORMAL, "200 min"), ("52 machines (200 nodes)", HIGH, "8,000 min"))


def run(context: ExperimentContext) -> ExperimentFinding:
    compared, tables, plots = [], [], []
    for label, machines, paper in SIZES:
        jobs, nodes = busy_days(context, machines)
        found = compare(context, jobs, nodes)
        victim, quota = found.worst("quota")
        _, cells = found.worst("cells")
        compared += [
            Compared(
                f"{label}: longest excess queueing by quota (half a day)",
                paper,
                f"{quota:,.0f} min ({victim})",
                quota > 0 if machines == HIGH else None,
            ),
            Compared(f"{label}: the same with cells", "0", f"{cells:,.0f} min", removed(quota, cells)),
            Compared(
                f"{label}: tenants that wait longer than alone, quota / cells",
                "1 / 0" if machines == HIGH else "-",
                f"{len(found.suffering('quota'))} / {len(found.suffering('cells'))}",
                not found.suffering("cells"),
            ),
            Compared(
                f"{label}: fragmentation on average, quota / cells",
                "lower with cells",
                " / ".join(
                    f"{100 * found.summaries[sharing].fragmentation:.1f} %" for sharing in ("quota", "cells")
                ),
                found.summaries["cells"].fragmentation <= found.summaries["quota"].fragmentation,
            ),
        ]
        tables.append(tenants_table(found, label))
        plots.append(queueing_plot(found, victim, f"hived-load-{machines}", f"{label}: tenant {victim}"))
        shared = {sharing: found.results[sharing] for sharing in ("quota", "cells")}
        plots.append(
            fragmentation_plot(shared, f"hived-load-fragmentation-{machines}", f"{label}: fragmentation")
        )
    return ExperimentFinding(
        name="hived-load",
        title="HiveD, Figures 6 and 7: queueing in a cluster of the original load, and in a fuller one",
        setup="Twenty days of the Philly trace, 11 tenants, first in first out (YARN-CS), hard affinity.",
        compared=compared,
        differs=(
            "Philly's flat file has mostly single-device jobs (93 %, against 81 % in the paper), which find a "
            "place anywhere: fewer jobs "
            "can suffer from fragmentation, and at the lower load none has to."
        ),
        tables=tables,
        plots=plots,
    )
