"""FedRA: A Random Allocation Strategy for Federated Tuning to Unleash the Power of Heterogeneous Clients.

Shangchao Su, Bin Li, Xiangyang Xue. Equation numbers are those of the first version of the paper. `FederatedMethod`
implements steps 3 and 4 of Section 3.5 as its defaults. Clients minimise the cross-entropy, training the head and the
LoRA adapters of their blocks. The server sets r_j = sum_i M_ij |D_i| r_j^i / sum_i M_ij |D_i| for each block j, and
keeps the last round's r_j if no client held block j (Eq. 3).
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.random import Generator
from pydantic import Field

from fedsweep.methods.base import Allocations, FederatedMethod, Server
from fedsweep.training.aggregation import AggregationConfig
from fedsweep.types import Client, LayerAllocation, ServerState


class FedRA(FederatedMethod):
    """Random blocks for each client: in each round, client i draws the L_i blocks that it runs and trains."""

    name: Literal["fedra"] = "fedra"
    missing_layers: Literal["keep_previous", "ensure_cover"] = Field(
        "keep_previous",
        description="`keep_previous`: a block that no client drew keeps its parameters of the last round (Eq. 3); "
        "`ensure_cover`: drawn blocks are swapped at random until each block is drawn by at least one client (Eq. 4)",
    )

    def check(self, capacities: Sequence[int], num_layers: int, aggregation: AggregationConfig) -> None:
        """Raise ValueError if Eq. 4 cannot hold because the cohort draws fewer blocks than the model has."""
        if self.missing_layers == "ensure_cover" and sum(capacities) < num_layers:
            raise ValueError(
                f"`method.missing_layers` ensure_cover needs depths that sum to at least {num_layers} in every cohort, "
                f"but {list(capacities)} sum to {sum(capacities)}"
            )

    def allocate(self, state: ServerState, cohort: Sequence[Client], server: Server, rng: Generator) -> Allocations:
        """Draw the matrix M in {0, 1}^{N x L} with sum_j M_ij = L_i for each client i (Section 3.5, step 1)."""
        matrix = np.zeros((len(cohort), server.num_layers), dtype=bool)
        for row, client in zip(matrix, cohort, strict=True):
            row[rng.choice(server.num_layers, size=client.capacity, replace=False)] = True
        if self.missing_layers == "ensure_cover":
            cover(matrix, rng)
        rows = zip(cohort, matrix, strict=True)
        return {client.id: LayerAllocation.of(np.flatnonzero(row).tolist()) for client, row in rows}


def cover(matrix: np.ndarray, rng: np.random.Generator) -> None:
    """Move ones within rows of M at random until no column is empty (Eq. 4); raise ValueError if M has too few ones."""
    if matrix.sum() < matrix.shape[1]:
        raise ValueError(f"{matrix.sum()} drawn blocks cannot cover {matrix.shape[1]} blocks")
    for empty in np.flatnonzero(~matrix.any(axis=0)):
        spare = np.argwhere(matrix & (matrix.sum(axis=0) > 1))
        row, column = spare[rng.integers(len(spare))]
        matrix[row, column], matrix[row, empty] = False, True
