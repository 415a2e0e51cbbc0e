"""The options of the loop over communication rounds."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from fedsweep.common.config import Config
from fedsweep.common.rules import sets_ranks, sizes_given
from fedsweep.training.attacks import Attack

Cost = Literal["bytes_up", "trained_parameters", "flops", "memory"]


class FederationConfig(Config):
    """The number of communication rounds, and options for cohorts, client depths and malicious clients."""

    rounds: int = Field(100, gt=0, description="number of communication rounds")
    depths: tuple[int, ...] | Literal["dynamic"] | None = Field(
        None,
        description="L_i, the number of blocks that fit on a client, listed for each client, for each domain, or once "
        "for all clients; `dynamic` draws the number for each client in each round, from 1 to the depth of the "
        "backbone; `null` if `capacity` is set",
    )
    ranks: tuple[int, ...] | Literal["dynamic"] | None = Field(
        None,
        description="r_i, the rank of a client's LoRA adapters, listed for each client, for each domain, or once for "
        "all clients; `dynamic` draws the rank for each client in each round, from 1 to `lora.rank`; `null`: "
        "`lora.rank` for all clients",
    )
    capacity: tuple[Annotated[float, Field(gt=0)], ...] | None = Field(
        None,
        description="budget of a client as a share of the full model's cost, listed like `depths`; the largest depths "
        "or ranks within the budget are chosen; `null`: `depths` and `ranks` are given",
    )
    budget: Cost = Field(
        "bytes_up",
        description="cost that `capacity` limits: `bytes_up` (sent in a round), `trained_parameters`, `flops` (of a "
        "local step) or `memory` (peak during training)",
    )
    fit: Literal["depth", "rank", "both"] = Field(
        "depth",
        description="what is reduced until a client is within its budget: `depth`, the number of blocks; `rank`, the "
        "rank of the adapters; or `both`, such that the smaller of the two shares is as large as possible",
    )
    clients_per_round: Literal["one_per_domain"] | Annotated[int, Field(gt=0)] | None = Field(
        None,
        description="number of clients drawn in each round; `one_per_domain` draws one per domain, `null` takes all",
    )
    evaluate_every: int = Field(
        1,
        gt=0,
        description="number of rounds from one evaluation to the next; the untuned model, the last round and the "
        "rounds at which the scheduler asha, asha_async, arms or pbt compares trials are always evaluated",
    )
    malicious_share: float = Field(
        0.0, ge=0, lt=1, description="share of all clients that are malicious, the same clients in every round"
    )
    attack: Attack = Field(
        "reversed_update",
        description="attack of the malicious clients: `reversed_update` negates their change of the global model, "
        "`reversed_weights` negates all their trained values",
    )

    @property
    def sets_ranks(self) -> bool:
        """True if clients have ranks of their own, which `ranks` lists or a budget decides."""
        return sets_ranks(self)

    def _violations(self) -> Iterator[str]:
        return sizes_given(self)
