"""The sizes and the costs of the clients of arms that have budgets (`federation.capacity`)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

from fedsweep.federation.budget import IN_WORDS, OF_A_STEP, Size, amount, counter_of
from fedsweep.federation.client_costs import ClientCosts
from fedsweep.federation.federation_config import Cost
from fedsweep.federation.run_config import RunConfig
from fedsweep.results.arms import Arm, arm_label, identity
from fedsweep.results.declared_comparisons import baselines, family_of
from fedsweep.sweep.plan.plan import Plan
from fedsweep.types import ClientId

TOLERANCE = 0.05
"""The largest difference between the costs of two arms that count as equal, as a share of the larger cost."""


@dataclass(frozen=True)
class FittedClients:
    """Clients of an arm that have the same size and the same costs."""

    clients: tuple[ClientId, ...]
    size: Size
    rank: int
    """The rank of the adapters, also if the clients have the full rank."""
    costs: ClientCosts


def fitted_clients(config: RunConfig) -> list[FittedClients]:
    """Return the clients of a run with their depths, ranks and costs; neighbours of equal size are one entry.

    The list is empty if the run has no budgets.
    """
    if config.federation.capacity is None:
        return []
    sizes = _sizes(config)
    each = [(sizes[client], costs, client) for client, costs in _costs(config, count_step=True).items()]
    return [
        FittedClients(
            tuple(client for *_, client in members), size, config.lora.rank if size.rank is None else size.rank, costs
        )
        for (size, costs), members in groupby(each, key=itemgetter(0, 1))
    ]


def unequal_budgets(plan: Plan) -> Iterator[str]:
    """Yield a sentence for each two arms of a comparison whose budgeted costs differ by more than 5%.

    The cost of an arm is the sum over all clients of the run. If the sums differ by less, the costs of each client are
    compared. If only one of two arms has budgets, its budgeted cost is compared. Arms whose depths or ranks are drawn
    in each round are left out.

    If arms are tuned, the sentences are yielded only for the tuning sweep, which is the first of the three linked
    sweeps, and once for all samples of an arm.
    """
    stage = plan.request.stage
    if stage is not None and stage.name != "tuning":
        return
    configs = dict[str, tuple[Arm, RunConfig]]()
    for arm, config in plan.configs:
        untuned = arm if stage is None else stage.untuned(arm)
        configs.setdefault(identity(untuned), (untuned, config))
    for one, other in _pairs(plan, [arm for arm, _ in configs.values()]):
        (arm, config), (against, base) = configs[one], configs[other]
        federations = [each.federation for each in (config, base)]
        budgets = [each.budget for each in federations if each.capacity is not None]
        if not budgets or one == other or any("dynamic" in (each.depths, each.ranks) for each in federations):
            continue
        if len(set(budgets)) > 1:
            yield f"{_named(arm, against)} have different budgets, {budgets[0]} and {budgets[1]}."
        elif found := _difference(config, base, budgets[0]):
            yield f"{_named(arm, against)} {found}"


def _difference(config: RunConfig, base: RunConfig, cost: Cost) -> str | None:
    """Return the end of a sentence about two runs whose costs differ; None if they are equal."""
    first, second = _amounts(config, cost), _amounts(base, cost)
    one, other = sum(first.values()), sum(second.values())
    if (share := _relative(one, other)) > TOLERANCE:
        return (
            f"differ by {100 * share:.1f}% in their budgeted cost, the {IN_WORDS[cost]}: {one:,} and {other:,}, summed "
            "over all clients."
        )
    shares = {client: _relative(first[client], second[client]) for client in first if client in second}
    if shares and max(shares.values()) > TOLERANCE:
        client = max(shares, key=lambda each: shares[each])
        return (
            f"differ by up to {100 * shares[client]:.1f}% in the budgeted cost of a client, the {IN_WORDS[cost]}: "
            f"{first[client]:,} and {second[client]:,} for the client {client}."
        )
    return None


def _relative(one: int, other: int) -> float:
    return abs(one - other) / max(one, other, 1)


def _amounts(config: RunConfig, cost: Cost) -> dict[ClientId, int]:
    return {client: amount(costs, cost) for client, costs in _costs(config, cost in OF_A_STEP).items()}


def _sizes(config: RunConfig) -> dict[ClientId, Size]:
    ranks = config.client_ranks()
    return {client: Size(depth, ranks[client]) for client, depth in config.capacities().items()}


def _costs(config: RunConfig, count_step: bool) -> dict[ClientId, ClientCosts]:
    counter = counter_of(config, _sizes(config))
    return {client.id: counter.largest_costs(client, count_step) for client in counter.clients}


def _pairs(plan: Plan, arms: Sequence[Arm]) -> list[tuple[str, str]]:
    """Return the identities of the arms that are compared with each other."""
    family = family_of(plan.space.comparisons, arms, plan.space.goal.metric, baselines(arms, plan.space.baseline))
    return [(one.arm, one.against) for one in family] or [(identity(arm), identity(arms[0])) for arm in arms[1:]]


def _named(arm: Arm, against: Arm) -> str:
    return f"The arms {arm_label(arm)} and {arm_label(against)}"
