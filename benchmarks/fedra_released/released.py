"""FedRA's released code in the comparison with fedsweep: wrappers of its modules, and its main loop per method."""

import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from fedsweep.methods import FederatedMethod
from fedsweep.methods.depthfl import DepthFL
from fedsweep.methods.fedra import FedRA
from fedsweep.methods.inclusivefl import InclusiveFL
from fedsweep.types import AdapterState

from .setting import BETWEEN, CLASSES, DEPTHS, HEADS, LAYERS, RATE, WIDTH, Batch

SOURCES = ("client.py", "server.py", "utils.py", "models/GetModel.py", "models/structure.py")
EVERYONE = list(range(len(DEPTHS)))


@dataclass(frozen=True)
class Comparison:
    """A method of fedsweep, and functions that run a round of the same method in the released code."""

    method: FederatedMethod
    deal: Callable[[Any, int], tuple[list[dict[str, Tensor]], np.ndarray | None]]
    """Map the server and the round to the tensors that each client loads, and the allocation matrix or None."""
    train: Callable[[Any, Any, int, int], None]
    """Train a client, given the client, the server, the round and the smallest number of batches of a client."""
    aggregate: Callable[[Any, list[dict[str, Tensor]]], None]
    """Aggregate the tensors of all clients on the server."""
    heads_every: int = 0
    """The number of blocks from one head of DepthFL to the next; 0 for other methods."""


class Released:
    """The server and the clients of FedRA's released code, each with its own model."""

    def __init__(self, code: Path, comparison: Comparison, weights: dict[str, Tensor], dropout: float) -> None:
        self._comparison = comparison
        client, server, utils, builder = _released_modules(code)
        self._evaluation = utils.evaluation
        # The released code uses ViT-B/16 with downloaded weights and a fixed LoRA dropout; replace all three.
        builder.VPT_ViT = partial(builder.VPT_ViT, embed_dim=WIDTH, num_heads=HEADS)
        builder.timm = SimpleNamespace(
            create_model=lambda name, pretrained: SimpleNamespace(state_dict=lambda: weights)
        )
        client.tqdm = utils.tqdm = lambda items: items
        for module in (client, server):
            module.LoraConfig = _with_dropout(module.LoraConfig, dropout)
        args = SimpleNamespace(domains=len(DEPTHS), clients_for_eachdomain=1)
        heads: dict[str, Any] = {"num_classes": CLASSES, "depth_cls": comparison.heads_every}
        self._server = server.Server(num_layers=LAYERS, args=args, clayers=DEPTHS, **heads)
        self._clients = [client.Client([], num_layers=depth, **heads) for depth in DEPTHS]

    def load(self, adapter: AdapterState) -> None:
        """Load fedsweep's adapters and head into the server's model."""
        unknown = self._server.global_model.load_state_dict(
            {_their_name(name): tensor for name, tensor in adapter.items()}, strict=False
        ).unexpected_keys
        if unknown:
            raise KeyError(f"not tensors of the released model: {', '.join(unknown)}")

    def adapter(self, names: Sequence[str]) -> AdapterState:
        """Return the server's adapters and head, keyed by `names`, which are the names of the tensors in fedsweep."""
        tensors = self._server.global_model.state_dict()
        return {name: tensors[_their_name(name)].clone() for name in names}

    def deal(self, number: int) -> tuple[list[dict[str, Tensor]], np.ndarray | None]:
        """Return, for round `number`, the tensors that each client loads, and the allocation matrix.

        The matrix is None if the method draws no allocation.
        """
        return self._comparison.deal(self._server, number)

    def train(self, place: int, number: int, part: dict[str, Tensor], loaders: list[list[Batch]]) -> None:
        """Train one client.

        Args:
            place: The index of the client.
            number: The number of the round.
            part: The tensors that the client loads before training.
            loaders: The batches of each client. The smallest number of batches limits the local steps.
        """
        client = self._clients[place]
        client.load_para(part)
        client.dataloader = loaders[place]
        self._comparison.train(client, self._server, number, min(map(len, loaders)))

    def aggregate(self) -> None:
        """Aggregate the tensors of all clients on the server."""
        self._comparison.aggregate(self._server, [client.get_para() for client in self._clients])

    def evaluate(self, loader: list[Batch]) -> None:
        """Evaluate the global model on batches of test images."""
        self._evaluation(self._server.global_model, [loader])


@contextmanager
def without_cuda() -> Iterator[None]:
    """Make `.cuda()` of tensors and modules do nothing during the context, because the released code calls it."""
    with (
        patch.object(torch.Tensor, "cuda", lambda tensor: tensor),
        patch.object(torch.nn.Module, "cuda", lambda module: module),
    ):
        yield


def _released_modules(code: Path) -> list[Any]:
    """Import the released modules from the folder `code`, which is on the module path only during the import."""
    import peft  # noqa: F401  # before the released modules, one of whose folders has the name of a package that peft imports

    with patch.object(sys, "path", [str(code), *sys.path]), patch.dict(sys.modules):
        for name in ("client", "server", "utils", "models"):
            sys.modules.pop(name, None)
        return [importlib.import_module(name) for name in ("client", "server", "utils", "models.GetModel")]


def _with_dropout(config: Callable[..., Any], dropout: float) -> Callable[..., Any]:
    return lambda **options: config(**options | {"lora_dropout": dropout})


def _their_name(name: str) -> str:
    """Return the released code's name for a tensor of fedsweep; the prefix and the numbers of heads differ."""
    if name.startswith("heads."):
        _, depth, tensor = name.split(".")
        return f"back.base_model.model.mid_head.{BETWEEN.index(int(depth))}.{tensor}"
    return f"back.base_model.model.{name.removeprefix('backbone.')}"


def _deal_random(server: Any, number: int) -> tuple[list[dict[str, Tensor]], np.ndarray]:
    np.random.seed(number)  # the released code draws from the global stream
    with redirect_stdout(None):  # and prints the matrix
        parts = server.get_para_range(EVERYONE, number)
    return parts, server.lastA


def _deal_prefixes(server: Any, number: int) -> tuple[list[dict[str, Tensor]], None]:
    return [server.get_para_baseline() for _ in DEPTHS], None


def _train_plain(client: Any, server: Any, number: int, fewest: int) -> None:
    client.train_baseline(RATE, 1, fewest, number, server.global_model)


def _train_heads(client: Any, server: Any, number: int, fewest: int) -> None:
    client.train_depthfl(RATE, 1, number, fewest, number, server.global_model)


def _fill(server: Any, updates: list[dict[str, Tensor]]) -> None:
    server.agg_range_fill(updates, EVERYONE)


def _average(server: Any, updates: list[dict[str, Tensor]]) -> None:
    server.agg_baseline(updates)


DEPTHFL = DepthFL(heads=BETWEEN, own_head="shared", prediction="last", ramp=1.0)
COMPARISONS = {
    "fedra": Comparison(FedRA(), _deal_random, _train_plain, _fill),
    "inclusivefl": Comparison(
        InclusiveFL(beta=0), _deal_prefixes, _train_plain, _average
    ),  # as in the released main loop
    "depthfl": Comparison(DEPTHFL, _deal_prefixes, _train_heads, _average, heads_every=3),
}
