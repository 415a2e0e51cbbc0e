"""Metrics of the averaged LoRA adapters of a round."""

from collections.abc import Sequence

from fedsweep.methods.base import FederatedMethod, Server
from fedsweep.methods.capabilities import LoraRule
from fedsweep.models.layered import LayeredModel
from fedsweep.models.lora import effective_scaling
from fedsweep.results.history import ENERGY
from fedsweep.training.aggregation import energy_beyond, lora_residual
from fedsweep.types import AdapterState, ClientUpdate, ServerState

RESIDUAL, NORM = "lora/residual", "lora/relative_norm"


def of_average(
    method: FederatedMethod,
    model: LayeredModel,
    server: Server,
    before: ServerState,
    after: ServerState,
    updates: Sequence[ClientUpdate],
) -> dict[str, float]:
    """Return the residual of the averaged adapters and, if clients have ranks, the energy beyond the smallest rank.

    Args:
        method: The method.
        model: The full model, whose frozen factors A complete the products of a run that trains only B.
        server: The server's constants.
        before: The server's state before the round.
        after: The state after the method's `aggregate`, without changes by the base optimizer.
        updates: The updates of the cohort.
    """
    own_rule = isinstance(method, LoraRule) or type(method).aggregate is FederatedMethod.aggregate
    aggregate = after.adapter if own_rule else None
    scaling = effective_scaling(server.lora)
    residual = lora_residual(before.adapter, updates, server.aggregation, aggregate, scaling, server.ranks)
    found = {RESIDUAL: residual}
    if server.ranks:
        factors = {**_frozen_factors(model), **after.adapter}
        found[ENERGY] = energy_beyond(min(server.ranks), before.adapter, factors, scaling)
    return found


def _frozen_factors(model: LayeredModel) -> AdapterState:
    parameters = model.named_parameters()
    return {name: one.detach() for name, one in parameters if ".lora_A." in name and not one.requires_grad}
