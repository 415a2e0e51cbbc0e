"""FedRA: A Random Allocation Strategy for Federated Tuning to Unleash the Power of Heterogeneous Clients.

Shangchao Su, Bin Li, Xiangyang Xue. The equation numbers are those of the first version of the paper.

The defaults of `FederatedMethod` implement steps 3 and 4 of Section 3.5. Clients minimise the cross-entropy by training
the head and the LoRA adapters of their blocks. The server then averages the adapters of each block j over the clients
that hold the block (Eq. 3):

    r_j = sum_i M_ij |D_i| r_j^i / sum_i M_ij |D_i|

Here r_j^i is the adapter of block j from client i, and |D_i| is the client's number of images. M_ij is 1 if client i
holds block j, and 0 otherwise. If no client holds block j, r_j keeps its previous value.
"""

from collections.abc import Collection, Sequence
from typing import Literal

import numpy as np
from numpy.random import Generator
from pydantic import Field

from fedsweep.methods.base import Allocations, FederatedMethod, Server
from fedsweep.methods.capabilities import UnequalRanks
from fedsweep.training.aggregation import AggregationConfig
from fedsweep.types import Client, LayerAllocation, ServerState


class FedRA(FederatedMethod, UnequalRanks):
    """A method that allocates random blocks: in each round, client i runs and trains L_i randomly drawn blocks.

    L_i is the number of blocks that fit on client i.
    """

    name: Literal["fedra"] = "fedra"
    missing_layers: Literal["keep_previous", "ensure_cover"] = Field(
        "keep_previous",
        description="`keep_previous`: a block that no client drew keeps its parameters of the previous round (Eq. 3); "
        "`ensure_cover`: drawn blocks are swapped at random until each block is drawn by at least one client (Eq. 4)",
    )

    def check(self, capacities: Sequence[int], num_layers: int, aggregation: AggregationConfig) -> None:
        """Raise ValueError if the option `missing_layers` is `ensure_cover` but a cohort could hold too few blocks.

        With `ensure_cover`, each block is held by at least one client of the cohort (Eq. 4). The clients' numbers of
        blocks must therefore sum to at least the number of blocks of the backbone.
        """
        if self.missing_layers == "ensure_cover" and sum(capacities) < num_layers:
            raise ValueError(
                f"`method.missing_layers` ensure_cover needs depths that sum to at least {num_layers} in every cohort, "
                f"but {list(capacities)} sum to {sum(capacities)}"
            )

    def draws_blocks(self, depths: Collection[int], num_layers: int) -> bool:
        """Return whether a client can have fewer blocks than the backbone; a client of full depth holds all blocks."""
        return min(depths) < num_layers

    def allocate(self, state: ServerState, cohort: Sequence[Client], server: Server, rng: Generator) -> Allocations:
        """Draw the blocks of each client at random (Section 3.5, step 1).

        The allocation is a matrix M, in which M_ij is 1 if client i holds block j, and 0 otherwise. Each row i sums to
        L_i, the number of blocks that fit on client i.
        """
        matrix = np.zeros((len(cohort), server.num_layers), dtype=bool)
        for row, client in zip(matrix, cohort, strict=True):
            row[rng.choice(server.num_layers, size=client.capacity, replace=False)] = True
        if self.missing_layers == "ensure_cover":
            cover(matrix, rng)
        rows = zip(cohort, matrix, strict=True)
        return {client.id: LayerAllocation.of(np.flatnonzero(row).tolist()) for client, row in rows}


def cover(matrix: np.ndarray, rng: np.random.Generator) -> None:
    """Swap blocks in the allocation matrix at random until every block is held by at least one client (Eq. 4).

    Each swap moves a true entry within its row, so each client keeps its number of blocks.

    Args:
        matrix: The boolean matrix (clients, blocks), which is changed in place. An entry is true if the client holds
            the block.
        rng: The random generator.

    Raises:
        ValueError: The matrix has fewer true entries than columns.
    """
    if matrix.sum() < matrix.shape[1]:
        raise ValueError(f"{matrix.sum()} drawn blocks cannot cover {matrix.shape[1]} blocks")
    for empty in np.flatnonzero(~matrix.any(axis=0)):
        spare = np.argwhere(matrix & (matrix.sum(axis=0) > 1))
        row, column = spare[rng.integers(len(spare))]
        matrix[row, column], matrix[row, empty] = False, True
