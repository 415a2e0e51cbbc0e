"""The options of the loop over communication rounds."""

from typing import Annotated, Literal

from pydantic import Field

from fedsweep.common.config import Config
from fedsweep.training.attacks import Attack


class FederationConfig(Config):
    """The number of communication rounds, and options for cohorts, client depths and malicious clients."""

    rounds: int = Field(100, gt=0, description="number of communication rounds")
    depths: tuple[int, ...] | Literal["dynamic"] = Field(
        description="L_i, the number of blocks that fit on a client, listed for each client, for each domain, or once "
        "for all clients; `dynamic` draws the number for each client in each round, from 1 to the depth of the backbone"
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
