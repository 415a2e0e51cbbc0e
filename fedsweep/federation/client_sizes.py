"""The sizes of clients: the numbers of blocks that fit on them, and the ranks of their adapters."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from fedsweep.common.config import Config
from fedsweep.methods.capabilities import LoraRule, UnequalRanks
from fedsweep.training.aggregation_rules import TensorRule
from fedsweep.types import ClientId

T = TypeVar("T")
WORDS = {
    "federation.depths": "depth",
    "federation.ranks": "rank",
    "federation.capacity": "share",
    "devices": "profile",
}
"""The noun for one item of each option that lists a value for each client."""


def of_clients(
    option: str, sizes: Sequence[T], clients: Mapping[ClientId, str], domains: Sequence[str]
) -> dict[ClientId, T]:
    """Return the size (or another value) of each client, keyed by client id.

    Args:
        option: The name of the option that lists the sizes, a key of `WORDS`.
        sizes: One size for each client, one for each domain, or one for all clients.
        clients: The domain of each client, keyed by client id.
        domains: The domains of the clients, in the order in which `sizes` lists them; empty if clients have images of
            several domains.

    Raises:
        ValueError: The length of `sizes` is none of the allowed ones.
    """
    if len(sizes) == len(clients):
        return dict(zip(clients, sizes, strict=True))
    if len(sizes) == 1:
        return dict.fromkeys(clients, sizes[0])
    if len(sizes) == len(domains):
        of_domain = dict(zip(domains, sizes, strict=True))
        return {client: of_domain[domain] for client, domain in clients.items()}
    one, found = WORDS[option], f"but it has {len(sizes)}: {_listed(sizes)}"
    if len(clients) == 1:
        raise ValueError(f"`{option}` must have one {one} for the only client, {found}")
    by_domain = f", one for each of the {len(domains)} domains" if 0 < len(domains) < len(clients) else ""
    raise ValueError(
        f"`{option}` must have one {one} for each of the {len(clients)} clients{by_domain}, or one for all "
        f"clients, {found}"
    )


def _listed(sizes: Sequence[Any]) -> str:
    plain = [one.model_dump() if isinstance(one, Config) else one for one in sizes]
    return json.dumps(plain) if any(isinstance(one, str | dict) for one in plain) else str(plain)


def check_ranks(config: Any) -> None:
    """Raise ValueError if clients cannot have the ranks of their adapters, or the method cannot aggregate them.

    Args:
        config: The `RunConfig`.
    """
    ranks, full, method = config.federation.ranks, config.lora.rank, config.method
    if isinstance(method, LoraRule):
        _check_rule(config)
    if config.federation.capacity is not None and config.federation.fit != "depth":
        ranks = config.federation.fit
    if ranks is None:
        return
    if not isinstance(method, UnequalRanks):
        why = "trains no LoRA adapters" if not method.needs.lora else "needs adapters of one rank"
        option, must = ("ranks", "null") if config.federation.ranks is not None else ("fit", "depth")
        raise ValueError(
            f"`federation.{option}` must be {must}, because `method` {method.name} {why}, but it is {_shown(ranks)}"
        )
    for rank in () if isinstance(ranks, str) else ranks:
        if not 1 <= rank <= full:
            raise ValueError(
                f"`federation.ranks` must contain numbers from 1 to {full}, `lora.rank`, but one is {rank}"
            )
    if not isinstance(config.aggregation.rule, TensorRule):
        set_by = "`federation.ranks`" if config.federation.ranks is not None else f"`federation.fit` {ranks}"
        raise ValueError(
            f"{set_by} needs an `aggregation.rule` that combines each tensor on its own, such as mean, but it is "
            f"{config.aggregation.rule.name}"
        )
    if config.base_optimizer.name == "feddyn" and config.lora.rank_scaling != "held":
        raise ValueError(
            "`lora.rank_scaling` must be held with `base_optimizer` feddyn, whose stored gradients belong to one "
            f"scaling, but it is {config.lora.rank_scaling}"
        )


def _check_rule(config: Any) -> None:
    method, aggregation = config.method, config.aggregation
    if aggregation.lora != "factors" or aggregation.rule.name != "mean":
        option, value = ("rule", aggregation.rule.name) if aggregation.lora == "factors" else ("lora", aggregation.lora)
        raise ValueError(
            f"`aggregation.{option}` must be {'factors' if option == 'lora' else 'mean'} for `method` {method.name}, "
            f"which has a rule of its own, but it is {value}"
        )
    if config.federation.ranks == "dynamic" and method.changes_ranks:
        raise ValueError(
            f"`federation.ranks` must be null or a list of numbers for `method` {method.name}, which changes the "
            "clients' ranks itself, but it is dynamic"
        )
    if method.folds and config.lora.patch_embed:
        raise ValueError(
            f"`lora.patch_embed` must be false for `method` {method.name}, which changes frozen weights of linear "
            "layers only, but it is true"
        )
    if config.base_optimizer.name == "feddyn" and not method.keeps_factors:
        raise ValueError(
            "`base_optimizer` feddyn stores gradients of LoRA's A and B and cannot be combined with `method` "
            f"{method.name}, which replaces A and B in every round"
        )


def _shown(ranks: Any) -> str:
    return ranks if isinstance(ranks, str) else str(list(ranks))
