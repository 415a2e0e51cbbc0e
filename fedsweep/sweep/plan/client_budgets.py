"""The sizes and the costs of the clients of arms that have budgets (`federation.capacity`)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

from fedsweep.federation.budget import IN_WORDS, Size, amount, costs_of
from fedsweep.federation.client_costs import ClientCosts
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


def fitted_clients(config: RunConfig, count_step: bool = True) -> list[FittedClients]:
    """Return the clients of a run with their depths, ranks and costs; neighbours of equal size are one entry.

    The list is empty if the run has no budgets. `count_step` is that of `costs_of`.
    """
    if config.federation.capacity is None:
        return []
    ranks = config.client_ranks()
    sizes = {client: Size(depth, ranks[client]) for client, depth in config.capacities().items()}
    domains = config.client_domains()
    distinct = {(domains[client], size): client for client, size in sizes.items()}
    known = {key: costs_of(config, client, key[1], count_step) for key, client in distinct.items()}
    each = [(client, size, known[domains[client], size]) for client, size in sizes.items()]
    return [
        FittedClients(
            tuple(client for client, _, _ in members), size, config.lora.rank if size.rank is None else size.rank, costs
        )
        for (size, costs), members in groupby(each, key=itemgetter(1, 2))
    ]


def unequal_budgets(plan: Plan) -> Iterator[str]:
    """Yield a sentence for each two arms of a comparison whose budgeted costs differ by more than 5%.

    The cost of an arm is the sum over all clients of the run. If arms are tuned, the sentences are yielded only for the
    tuning sweep, which is the first of the three linked sweeps, and once for all samples of an arm.
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
        if None in (config.federation.capacity, base.federation.capacity) or one == other:
            continue
        cost, first, second = config.federation.budget, _total(config), _total(base)
        if base.federation.budget != cost:
            yield f"{_named(arm, against)} have different budgets, {cost} and {base.federation.budget}."
        elif abs(first - second) > TOLERANCE * max(first, second):
            share = 100 * abs(first - second) / max(first, second)
            yield (
                f"{_named(arm, against)} differ by {share:.1f}% in their budgeted cost, the {IN_WORDS[cost]}: "
                f"{first:,} and {second:,}, summed over all clients."
            )


def _pairs(plan: Plan, arms: Sequence[Arm]) -> list[tuple[str, str]]:
    """Return the identities of the arms that are compared with each other."""
    family = family_of(plan.space.comparisons, arms, plan.space.goal.metric, baselines(arms, plan.space.baseline))
    return [(one.arm, one.against) for one in family] or [(identity(arm), identity(arms[0])) for arm in arms[1:]]


def _named(arm: Arm, against: Arm) -> str:
    return f"The arms {arm_label(arm)} and {arm_label(against)}"


def _total(config: RunConfig) -> int:
    clients = fitted_clients(config, count_step=False)
    return sum(len(one.clients) * amount(one.costs, config.federation.budget) for one in clients)
