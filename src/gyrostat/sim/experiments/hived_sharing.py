"""HiveD, Figure 5 (§5.1): private clusters, quotas and cells under three schedulers."""

from __future__ import annotations

from gyrostat.sim.experiments.finding import Compared, ExperimentContext, ExperimentFinding, TextTable
from gyrostat.sim.experiments.hived_trace import busy_days, compare, queueing_plot, removed

POLICIES = {"YARN-CS": "fifo", "Gandiva": "gandiva", "Tiresias": "tiresias"}
PAPER = {"YARN-CS": "1,000 min", "Gandiva": "400 min", "Tiresias": "330 min"}


def run(context: ExperimentContext) -> ExperimentFinding:
    jobs, nodes = busy_days(context)
    compared, rows, plots = [], [], []
    for name, policy in POLICIES.items():
        found = compare(context, jobs, nodes, policy)
        victim, quota = found.worst("quota")
        _, cells = found.worst("cells")
        rows.append(
            [
                name,
                *(f"{found.summaries[sharing].all.jct_mean / 3600:.2f} h" for sharing in found.summaries),
                *(f"{found.summaries[sharing].all.queueing_mean / 60:.1f}" for sharing in found.summaries),
                *(str(len(found.suffering(sharing))) for sharing in ("quota", "cells")),
            ]
        )
        compared += [
            Compared(
                f"{name}: longest excess queueing by quota (half a day)",
                PAPER[name],
                f"{quota:,.0f} min ({victim})",
                quota > 0,
            ),
            Compared(f"{name}: the same with cells", "0", f"{cells:,.0f} min", removed(quota, cells)),
            Compared(
                f"{name}: tenants that wait longer than alone with cells",
                "0",
                str(len(found.suffering("cells"))),
                not found.suffering("cells"),
            ),
        ]
        ratio = found.summaries["cells"].all.jct_mean / found.summaries["quota"].all.jct_mean - 1
        compared.append(
            Compared(
                f"{name}: mean JCT, cells against quota",
                "-12 % … +3 %",
                f"{100 * ratio:+.1f} %",
                ratio <= 0.03,
            )
        )
        plots.append(queueing_plot(found, victim, f"hived-sharing-{policy}", f"{name}: tenant {victim}"))
    return ExperimentFinding(
        name="hived-sharing",
        title="HiveD, Figure 5: sharing anomalies under three schedulers, and none with cells",
        setup=(
            f"{len(jobs)} jobs of twenty days of the Philly trace, 11 tenants, {sum(nodes.values())} machines with "
            "8 devices (90 % load), hard "
            "affinity, no costs of preemption. The paper sampled ten days of its own trace for 96 devices. Jobs "
            "beyond quota or VC borrow."
        ),
        compared=compared,
        differs=(
            "The trace, and with it who suffers when and by how much, is another one; quotas follow load, where "
            "the paper's were "
            "those of the deployment. Gandiva's introspection is one setting here, and its time-slicing is not "
            "modelled. Without "
            "borrowing, jobs in cells start exactly when they would alone, under every policy. With borrowing, "
            "policies that "
            "preempt or let jobs pass order jobs otherwise once some have run on borrowed devices, so a tenant "
            "may for half a day "
            "wait longer than alone, though no tenant does on average."
        ),
        tables=[
            TextTable(
                "mean JCT; mean queueing in minutes; tenants that wait longer than alone",
                ["", "private", "quota", "cells", "private", "quota", "cells", "quota", "cells"],
                rows,
            )
        ],
        plots=plots,
    )
