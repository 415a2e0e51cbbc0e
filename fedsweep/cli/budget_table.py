"""The table of the depths, ranks and costs of clients with budgets, which a dry run prints."""

from rich import box
from rich.table import Table
from rich.text import Text

from fedsweep.federation.client_costs import ClientCosts
from fedsweep.results.arms import arm_label
from fedsweep.sweep.plan.client_budgets import fitted_clients
from fedsweep.sweep.plan.plan import Plan

HEADS = ("depth", "rank", "MB up", "trained", "GFLOPs\na step", "peak\nMB")


def budget_table(plan: Plan) -> Table | None:
    """Return a table with a row for each arm and client size, or None if no arm has budgets (`federation.capacity`).

    Below the table, a line gives each reason for which a cost could not be counted and is shown as `-`.
    """
    reasons, title = dict[str, None](), "Clients within their budgets"
    table = Table(box=box.SIMPLE_HEAD, title=title, title_style="bold", title_justify="left", caption_justify="left")
    table.add_column("arm", overflow="fold")
    table.add_column("clients", overflow="fold")
    for head in HEADS:
        table.add_column(head, justify="right", no_wrap=True)
    for arm, config in plan.configs:
        for place, found in enumerate(fitted_clients(config)):
            name = arm_label(arm) if place == 0 else ""
            table.add_row(name, ", ".join(found.clients), str(found.size.depth), str(found.rank), *_costs(found.costs))
            if found.costs.missing:
                reasons[f"-: {found.costs.missing}"] = None
    table.caption = Text("\n".join(reasons), style="none") if reasons else None
    return table if table.row_count else None


def _costs(costs: ClientCosts) -> tuple[str, str, str, str]:
    flops, memory = costs.flops_per_step, costs.memory
    return (
        f"{costs.bytes_up / 1e6:.4g}",
        f"{costs.trained:,}",
        "-" if flops is None else f"{flops / 1e9:.4g}",
        "-" if memory is None else f"{memory / 1e6:.4g}",
    )
