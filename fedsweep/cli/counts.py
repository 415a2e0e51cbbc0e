"""Tables of parameter counts and of the costs of clients, computed without training."""

from collections.abc import Iterator, Mapping, Sequence

from rich import box
from rich.table import Table

from fedsweep.cli.output import result_console
from fedsweep.results.arms import Arm, Reference, arm_label
from fedsweep.sweep.plan.model_counts import BANDWIDTHS, COUNTS, Counted, count_parameters
from fedsweep.sweep.plan.plan import Plan
from fedsweep.sweep.space.settings import Parameters

GAP = 3  # width of the border and padding between two columns
NARROWEST = 80  # minimum width of a table; in a narrower terminal, its lines wrap


def show_counts(plan: Plan) -> None:
    """Print the parameter counts of each arm, and the costs of its clients.

    If the plan contains values that a paper reports (`plan.reference`), also print these values.
    """
    measure, console = plan.space.measure, result_console()
    classes = measure.classes if isinstance(measure, Parameters) else 0
    arms = plan.arms
    counted = [count_parameters(plan.resolve(arm, plan.space.planned_seeds[0]), classes, costs=True) for arm in arms]
    console.print(plan.name, style="bold")
    console.width = max(console.width, NARROWEST)
    for table in (*models(arms, counted, plan.reference, console.width), *clients(arms, counted)):
        console.print(table)
    for note in notes(counted):
        console.print(note)
    console.print(f"Counted from tensor shapes, with a head for {classes} classes. Nothing was trained or recorded.")
    if plan.reference is not None:
        console.print(f"Paper: {plan.reference.source}.")


def models(arms: Sequence[Arm], counted: Sequence[Counted], reference: Reference | None, width: int) -> Iterator[Table]:
    """Yield tables of parameter counts with one column per arm.

    Each table is at most `width` characters wide, so many arms are divided among several tables. If
    `reference` is given, it contains the values that a paper reports, and the tables show them below the computed
    counts.
    """
    found: list[Mapping[str, float]] = [{**one.parameters, **one.shares} for one in counted]
    asked = reference.metrics() if reference else []
    present = [name for name in COUNTS if any(name in one for one in found)]
    shown = [name for name in present if name in asked or name.startswith("parameters/")]
    words = [row_name(name) for name in shown]
    size = max(len(_number(one.get(name))) for one in found for name in shown)
    first = max(map(len, [*words, "in the paper"])) + 1
    side = max(1, (width - first - 2 * GAP) // (size + GAP))
    for start in range(0, len(arms), side):
        columns = range(start, min(start + side, len(arms)))
        table = Table(box=box.ROUNDED)
        table.add_column("parameters", min_width=first, no_wrap=True)
        for place in columns:
            table.add_column(arm_label(arms[place]), justify="right", min_width=size, overflow="fold")
        for name, word in zip(shown, words, strict=True):
            table.add_row(word, *(_number(found[place].get(name)) for place in columns))
            printed = [reference.value(arms[place], name) if reference else None for place in columns]
            if any(value is not None for value in printed):
                table.add_row(" in the paper", *map(_rounded, printed), style="dim")
        yield table


def row_name(metric: str) -> str:
    """Return the label of a metric in the tables of counts.

    >>> row_name("parameters/lora_per_block"), row_name("percent/trained/stage_2"), row_name("seconds/0.1MBps")
    ('lora per block', '% trained, stage 2', 's at 0.1 MB/s')
    """
    kind, name, *stage = metric.replace("_", " ").split("/")
    word = {"percent": f"% {name}", "seconds": f"s at {name.removesuffix('MBps')} MB/s"}.get(kind, name)
    return ", ".join([word, *stage])


def clients(arms: Sequence[Arm], counted: Sequence[Counted]) -> tuple[Table, Table, Table]:
    """Return tables of the clients' parameter counts, of their uploads, and of the costs of their training.

    All tables have one row for each combination of arm, client depth and training stage.
    """
    bricks = any(client.bricks for one in counted for client in one.clients)
    heads = ["parameters\nheld", *(["BRICKs\nof these", "%\nmore"] if bricks else []), "trained", "% of the\nbackbone"]
    held = _of_clients(heads)
    sent = _of_clients(["upload\nin bf16,\nbytes", *(f"upload\nin fp32, s\nat {speed:g} MB/s" for speed in BANDWIDTHS)])
    cost = _of_clients(["forward,\nGFLOPs", "backward,\nGFLOPs", "memory,\nMB", "received,\nMB", "sent,\nMB"])
    for arm, one in zip(arms, counted, strict=True):
        for place, client in enumerate(one.clients):
            who = client.stage if place else f"{arm_label(arm)} {client.stage}".strip(), str(client.depth)
            more = f"{client.bricks:,}", f"{100 * client.bricks / (client.held - client.bricks):.2f}"
            stand_ins = (more if client.bricks else ("", "")) if bricks else ()
            held.add_row(*who, f"{client.held:,}", *stand_ins, f"{client.trained:,}", f"{client.percent:.4g}")
            sent.add_row(*who, f"{client.bytes_up:,}", *(f"{client.seconds(speed):,.5g}" for speed in BANDWIDTHS))
            if (costs := client.costs) is not None:
                per_step = (_in_units(value, 1e9) for value in (costs.forward, costs.backward))
                in_bytes = (_in_units(value, 1e6) for value in (costs.memory, costs.bytes_down, costs.bytes_up))
                cost.add_row(*who, *per_step, *in_bytes)
    return held, sent, cost


def notes(counted: Sequence[Counted]) -> Iterator[str]:
    """Yield sentences that explain the table of costs, and its missing values."""
    yield (
        "The GFLOPs (10^9 operations) are those of one local step with `local.batch_size` images. The memory is the "
        "peak during the training of this client alone. A client receives and sends float32 values. A MB is 10^6 bytes."
    )
    costs = (client.costs for one in counted for client in one.clients)
    yield from dict.fromkeys(one.missing for one in costs if one is not None and one.missing)


def _of_clients(heads: Sequence[str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("arm", overflow="fold")
    for head in ["blocks\nheld", *heads]:
        table.add_column(head, justify="right", no_wrap=True)
    return table


def _rounded(value: float | None) -> str:
    """Format a count in the style of papers, e.g. 86.4M or 43.0K."""
    if value is None:
        return ""
    if value >= 1e6:
        return f"{value / 1e6:.1f}M"
    return f"{value / 1e3:.1f}K" if value >= 1e4 else f"{value:g}"


def _in_units(value: int | None, unit: float) -> str:
    """Format a number of FLOPs or bytes in GFLOPs or MB with four digits, or as a dash if it is unknown."""
    if value is None:
        return "-"
    return f"{value / unit:,.0f}" if value >= 1000 * unit else f"{value / unit:.4g}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
