"""The depths and ranks of clients that have a budget: a share of the cost of training the full model.

The full model has all blocks and adapters of the rank `lora.rank`, of which both factors are trained with the
cross-entropy (`all_large`). Its cost is the same for all methods, so methods with equal shares have equal budgets.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING, Literal, NamedTuple, cast

from fedsweep.federation.client_costs import ClientCosts, CostCounter, classes_of, cost_counter
from fedsweep.federation.federation_config import Cost
from fedsweep.methods.bounds import AllLarge
from fedsweep.types import Client, ClientId

if TYPE_CHECKING:
    from fedsweep.federation.run_config import RunConfig

IN_WORDS: dict[Cost, str] = {
    "bytes_up": "bytes sent in a round",
    "trained_parameters": "trained parameters",
    "flops": "FLOPs of a local step",
    "memory": "peak memory",
}
OF_A_STEP: frozenset[Cost] = frozenset(("flops", "memory"))
"""The costs that are counted by running a training step on the meta device."""
SLACK = 1 + 1e-9
"""A client is within its budget if its cost is at most the budget times this number, because shares are rounded."""


class Size(NamedTuple):
    """The size of a client."""

    depth: int
    rank: int | None
    """The rank of the adapters; None for the full rank."""


def fitted(config: RunConfig, capacities: Mapping[ClientId, float]) -> Mapping[ClientId, Size]:
    """Return the largest depth and rank of each client within its budget, keyed by client id.

    Runs that differ only in their seed or their devices are answered from a cache.

    Args:
        config: The run, in which `federation.capacity` is given.
        capacities: The budget of each client, as a share of the full model's cost.

    Raises:
        ValueError: The cost cannot be counted, or no depth or rank is within a budget.
    """
    key = config.model_dump_json(exclude={"seed", "seed_streams", "devices"})
    if key not in _FITTED:
        _FITTED[key] = _fitted(config, capacities)
    return _FITTED[key]


_FITTED: dict[str, Mapping[ClientId, Size]] = {}
"""The sizes of clients, keyed by the hyperparameters of the run without its seed and devices."""


def _fitted(config: RunConfig, capacities: Mapping[ClientId, float]) -> Mapping[ClientId, Size]:
    counters, sizes = _Counters(config), dict[tuple[str, float], Size]()
    domains = config.client_domains()
    for client, capacity in capacities.items():
        if (key := (domains[client], capacity)) not in sizes:
            sizes[key] = _largest(config, counters, client, capacity)
    found = {client: sizes[domains[client], capacity] for client, capacity in capacities.items()}
    counters.check(found, capacities)
    return found


def in_words(sizes: Collection[Size]) -> dict[str, str]:
    """Return the depths of clients and, unless all have the full rank, their ranks, as text.

    >>> in_words([Size(12, 8), Size(12, 4), Size(12, 4)])
    {'depths': '[3 x 12]', 'ranks': '[8, 2 x 4]'}
    """
    found = {"depths": [one.depth for one in sizes], "ranks": [one.rank for one in sizes if one.rank is not None]}
    return {name: f"[{', '.join(_runs(values))}]" for name, values in found.items() if values}


def _runs(values: list[int]) -> Iterator[str]:
    for value, same in groupby(values):
        number = len(list(same))
        yield f"{number} x {value}" if number > 1 else str(value)


def counter_of(config: RunConfig, sizes: Mapping[ClientId, Size]) -> CostCounter:
    """Return a counter of the costs of a run whose clients have the given sizes."""
    depths, ranks = zip(*sizes.values(), strict=True)
    full = config.lora.rank
    given = None if set(ranks) == {None} else tuple(full if rank is None else rank for rank in ranks)
    return cost_counter(_without_budgets(config, depths, given), classes_of(config))


def _without_budgets(
    config: RunConfig, depths: tuple[int, ...] | Literal["dynamic"], ranks: tuple[int, ...] | None
) -> RunConfig:
    given = {"capacity": None, "budget": "bytes_up", "fit": "depth", "depths": depths, "ranks": ranks}
    return config.model_copy(update={"federation": config.federation.model_copy(update=given)})


class _Counters:
    """Counters of the costs of a run's clients, and of the full model.

    A training step is counted only if the budget needs it.
    """

    def __init__(self, config: RunConfig) -> None:
        classes = classes_of(config)
        plain = _without_budgets(config, "dynamic", None)
        self.domains, self.own = config.client_domains(), cost_counter(plain, classes)
        self._config, self._plain, self._classes = config, plain, classes
        self._count_step = config.federation.budget in OF_A_STEP

    def costs(self, client: ClientId, size: Size) -> ClientCosts:
        """Return the costs of a client of the given size, in the most expensive stage of the method."""
        return self._of(self.own, client, size)

    def check(self, sizes: Mapping[ClientId, Size], capacities: Mapping[ClientId, float]) -> None:
        """Raise ValueError if a client is beyond its budget once all clients have their sizes.

        This can happen only if the model of a method depends on the depths of all clients, as that of `all_small`.
        """
        counter = counter_of(self._config, sizes)
        budget = self._config.federation.budget
        for client in counter.clients:
            costs = counter.largest_costs(client, self._count_step)
            share = amount(costs, budget) / amount(self.full(client.id), budget)
            if share > capacities[client.id] * SLACK:
                raise ValueError(
                    f"`federation.capacity` cannot be used with `method` {self._config.method.name}, whose model "
                    "depends on the depths of all clients; set `federation.depths` instead"
                )

    def full(self, client: ClientId) -> ClientCosts:
        """Return the costs of the full model."""
        return self._of(self._whole, client, Size(self._whole.model.num_layers, None))

    @cached_property
    def _whole(self) -> CostCounter:
        aggregation = self._plain.aggregation.model_copy(update={"lora": "factors"})
        plain = self._plain.model_copy(update={"method": AllLarge(), "aggregation": aggregation})
        return cost_counter(plain, self._classes)

    def _of(self, counter: CostCounter, client: ClientId, size: Size) -> ClientCosts:
        like = counter.clients[0]
        sized = Client(like.id, self.domains[client], like.train, size.depth, rank=size.rank)
        return counter.largest_costs(sized, self._count_step)


def amount(costs: ClientCosts, cost: Cost) -> int:
    """Return one of the four costs of a client.

    Raises:
        ValueError: The cost is unknown.
    """
    values = {
        "bytes_up": costs.bytes_up,
        "trained_parameters": costs.trained,
        "flops": costs.flops_per_step,
        "memory": costs.memory,
    }
    if (value := values[cost]) is None:
        raise ValueError(f"`federation.budget` {cost} cannot be counted: {costs.missing}")
    return value


def _largest(config: RunConfig, counters: _Counters, client: ClientId, capacity: float) -> Size:
    """Return the largest size of a client within its budget."""
    federation, layers, full = config.federation, config.backbone.depth, config.lora.rank
    whole = amount(counters.full(client), federation.budget)

    def share(size: Size) -> float:
        return amount(counters.costs(client, size), federation.budget) / whole

    def fits(size: Size) -> bool:
        return share(size) <= capacity * SLACK

    if federation.fit == "depth":
        if depth := _last(layers, lambda depth: fits(Size(depth, None))):
            return Size(depth, None)
        smallest, least = "a client with one block", Size(1, None)
    elif federation.fit == "rank":
        if rank := _last(full, lambda rank: fits(Size(layers, rank))):
            return Size(layers, rank)
        smallest, least = "a client with all blocks and rank 1", Size(layers, 1)
    else:
        if size := _balanced(layers, full, fits):
            return size
        smallest, least = "a client with one block and rank 1", Size(1, 1)
    if share(least) == share(Size(layers, None)):
        raise ValueError(
            f"`federation.capacity` must be at least {_up(share(least)):g} for `method` {config.method.name}, whose "
            f"clients take this share of the full model's {IN_WORDS[federation.budget]} with every "
            f"{'size' if federation.fit == 'both' else federation.fit}, but one is {capacity:g}"
        )
    raise ValueError(
        f"`federation.capacity` must be at least {_up(share(least)):g} for `federation.fit` {federation.fit}, because "
        f"{smallest} takes this share of the full model's {IN_WORDS[federation.budget]}, but one is {capacity:g}"
    )


def _last(most: int, fits: Callable[[int], bool]) -> int:
    """Return the largest number from 1 to `most` that fits, or 0 if none does; all numbers below it fit, too."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _balanced(layers: int, full: int, fits: Callable[[Size], bool]) -> Size | None:
    """Return the size whose smaller share, of the blocks or of the rank, is as large as possible.

    What is left of the budget is spent on more blocks, and then on a larger rank.
    """
    shares = sorted(
        {*(depth / layers for depth in range(1, layers + 1)), *(rank / full for rank in range(1, full + 1))}
    )
    least = [Size(math.ceil(one * layers - 1e-9), math.ceil(one * full - 1e-9)) for one in shares]
    if not (level := _last(len(least), lambda place: fits(least[place - 1]))):
        return None
    depth, rank = least[level - 1].depth, cast(int, least[level - 1].rank)
    depth += _last(layers - depth, lambda more: fits(Size(depth + more, rank)))
    return Size(depth, rank + _last(full - rank, lambda more: fits(Size(depth, rank + more))))


def _up(share: float) -> float:
    """Return the share, rounded up to four decimals."""
    return -(-share * 1e4 // 1) / 1e4
