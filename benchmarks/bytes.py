"""Count the bytes that cross a process boundary if the clients of a run train in another process.

    python -m benchmarks.bytes [--methods fedra rolora] [--width 48] [--to FILE]

The process of the clients knows the configuration, the images and the seed of the run, but no tensor of the server.
The server's process sends each client exactly the tensors of `Federation.sent`, in the safetensors format. The clients
send back the tensors of their updates. The size of a message is the number of bytes after its header.

The table lists the kilobytes that the server sends (down) and that the clients send (up) in each round, as a mean over
rounds 2 and 3. In round 1, some methods send more or less than in later rounds. A cell has one number if both are
equal, and "-" if the column does not apply to the method.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load as from_bytes
from safetensors.torch import save as to_bytes
from torch import Tensor

from fedsweep.common.yaml_values import Json, read_yaml
from fedsweep.federation.build_and_run import build
from fedsweep.federation.rounds import Federation
from fedsweep.federation.run_config import RunConfig
from fedsweep.methods import BUILT_IN, FederatedMethod
from fedsweep.methods.capabilities import UnequalRanks
from fedsweep.methods.fedag.method import FedAGState
from fedsweep.methods.fedms.stages import FedMSState
from fedsweep.models.client_rank import widened
from fedsweep.models.names import folded_name, is_folded, rank_dim
from fedsweep.report.text_tables import markdown_table
from fedsweep.testing.compare import tensors_in
from fedsweep.types import AdapterState, ClientId, ClientUpdate, LayerAllocation, ServerState

ROOT = Path(__file__).parents[1]
SERVERS_OWN = ("adapter", "client_memory", "server_memory")
"""The fields of the server's state that its process never tells the clients."""
SEEDED = ("flora", "fedsa_lora")
"""Methods whose clients draw factors from the common seed: all factors for FLoRA, and only B = 0 for FedSA-LoRA."""
METHODS = [one.model_fields["name"].default for one in BUILT_IN]
BLOCKS = 4
"""The number of blocks of the ViT."""
WIDTH = 48
"""The number of features of the ViT in the table of docs/concepts/ranks.md."""
COLUMNS: dict[str, dict[str, Json]] = {
    "full": {},
    "rank 4": {"lora.rank": 4},
    "ranks 8, 4, 1": {"federation.ranks": [8, 4, 1]},
    "cohorts of 2": {"federation.clients_per_round": 2},
    "ranks 8, 4, 1, cohorts of 2": {"federation.ranks": [8, 4, 1], "federation.clients_per_round": 2},
    "depth 2": {"federation.depths": [2]},
    "depths 1, 2, 4": {"federation.depths": [1, 2, 4]},
}
"""The columns of the table, with their changes of the run. In `full`, three clients of rank 8 hold all blocks."""
CLIP: dict[str, Json] = {"backbone": {"name": "digits_clip"}, "lora.position": "mlp", "federation.depths": [6]}
"""The changes of the run for methods that need a text encoder."""
SERVER_IMAGES: dict[str, Json] = {"partition.proxy_share": 0.02}
"""The change of the run for methods whose server trains on images."""
HEADS: dict[str, Json] = {"heads": [BLOCKS // 2]}
"""The option of DepthFL that adds a head in the middle of the network."""
OPTIONS: dict[str, dict[str, dict[str, Json]]] = {
    "all_large": {
        "": {},
        ", `freeze_a`": {"aggregation.lora": "freeze_a"},
        ", `product_svd`": {"aggregation.lora": "product_svd"},
    },
    "depthfl": {"": {f"method.{name}": value for name, value in HEADS.items()}},
    "fedbrick": {
        f" over `{name}`": {"method.over": {"name": name, **own}, "method.server_epochs": 1, **SERVER_IMAGES}
        for name, own in {"fedra": {}, "inclusivefl": {}, "depthfl": HEADS}.items()
    },
    "fedms": {
        f", stage {stage}": {
            **{"method.global_rounds": rounds, "method.gate": {"trunk": {"name": "digits_resnet"}}},
            **{"partition.validation_share": 0.1, **CLIP},
        }
        for stage, rounds in {"one": 3, "two": 0}.items()
    },
    "fedag": {
        "": {
            **{"method.clip": {"name": "digits_clip"}, "method.server": {"warmup_epochs": 1, "epochs": 1}},
            **{"synthetic": {"name": "surrogate", "share": 0.01}, **SERVER_IMAGES},
        }
    },
    "fedot": {"": {"method.bottom": 1, "method.top": 1}},
    **{name: {"": CLIP} for name in ("promptfl", "fedclip", "zero_shot")},
}
"""The changes of the run for methods that need some, keyed by method and by the end of the row's label."""


def table_rows() -> dict[str, dict[str, Json]]:
    """Return the changes of the run for each row of the table, keyed by the label of the row."""
    return {
        f"`{name}`{end}": {"method": name, **changes}
        for name in METHODS
        for end, changes in OPTIONS.get(name, {"": {}}).items()
    }


def config_of(changes: dict[str, Json], width: int = 12) -> RunConfig:
    """Return a run of three rounds with three clients, by default on an untrained ViT with `width` features."""
    name = ROOT / "experiments" / "fedra_digits.yaml"
    small: dict[str, Json] = {
        "backbone": {
            **{"name": "timm", "model": "vit_tiny_patch16_224", "pretrained": "none"},
            **{"img_size": 16, "patch_size": 8, "embed_dim": width, "num_blocks": BLOCKS, "num_heads": 2},
        },
        "data.domains": ["plain", "inverted", "noisy"],
        "data.test_fraction": 0.1,
        "federation.depths": [BLOCKS],
        "federation.rounds": 3,
        "lora.rank": 8,
        "local.steps": 1,
        "local.batch_size": 8,
    }
    return RunConfig.of(read_yaml(name), name.name).override({**small, **changes}, "bytes")


def applies(method: FederatedMethod, changes: dict[str, Json]) -> bool:
    """Return whether a method has the options of a column: LoRA adapters, and clients of unequal ranks."""
    if "federation.ranks" in changes:
        return isinstance(method, UnequalRanks)
    return method.needs.lora or "lora.rank" not in changes


def payload(message: bytes) -> int:
    """Return the number of bytes of the tensors in a message, which is what follows the header."""
    return len(message) - 8 - int.from_bytes(message[:8], "little")


@dataclass
class Crossed:
    """A round of which the clients trained in another process.

    Attributes:
        down: The bytes of the tensors that the server sent.
        up: The bytes of the tensors that the clients sent.
        state: The state of the server after the round.
    """

    down: int
    up: int
    state: ServerState


class ClientProcess:
    """A process in which the clients of a run train, one after another."""

    def __init__(self) -> None:
        context = get_context("spawn")
        self._end, other = context.Pipe()
        self._process: SpawnProcess = context.Process(target=serve, args=(other,), daemon=True)
        self._process.start()
        other.close()

    def close(self) -> None:
        """End the process."""
        self._end.send(None)
        self._process.join()

    def ask(self, *words: Any) -> Any:
        """Send a request, and return the answer; raise RuntimeError with the error of the process, if there is one."""
        self._end.send(words)
        answer = self._end.recv()
        if isinstance(answer, str):
            raise RuntimeError(answer)
        return answer

    def play(self, config: RunConfig) -> Iterator[Crossed]:
        """Run all rounds of a run, and yield each round."""
        federation = build(config)
        method, server, state = federation.method, federation.server, federation.initial_state()
        self.ask("begin", config)
        for round in range(1, config.federation.rounds + 1):
            cohort, trainer = federation.cohort(round), federation.trainer.at(round)
            state = method.begin_round(state, server, trainer)
            rows = federation.allocate(state, cohort, round)
            parcels = [to_bytes(_plain(one)) for one in federation.sent(state, rows)]
            down, up, updates = sum(map(payload, parcels)), 0, list[ClientUpdate]()
            told = {one.name: getattr(state, one.name) for one in fields(state) if one.name not in SERVERS_OWN}
            told = {name: value for name, value in told.items() if not any(True for _ in tensors_in(value))}
            for one, parcel in zip(federation.clients, parcels[len(rows) :], strict=False):
                self.ask("broadcast", round, one.id, parcel)
            for (client, row), parcel in zip(rows.items(), parcels, strict=False):
                adapter, extra, rest = self.ask("train", round, client, row, told, parcel)
                up += payload(adapter) + payload(extra)
                given = from_bytes(adapter)
                # safetensors sorts the names, and the last bits of FedAG depend on their order
                ordered = {name: given[name] for name in state.adapter if name in given}
                updates.append(ClientUpdate(client, adapter=ordered, extra=from_bytes(extra), **rest))
            state = method.end_round(method.aggregate(state, updates, server), server, trainer)
            yield Crossed(down, up, state)


class Clients:
    """The clients of a run in their own process, with the tensors that each of them has received or keeps."""

    def __init__(self, config: RunConfig) -> None:
        self.federation: Federation = build(config)
        self.untrained = self.federation.initial_state()
        self.seeded = config.method.name in SEEDED
        drawn = {
            name: one
            for name, one in self.untrained.adapter.items()
            if is_folded(name) or (self.seeded and rank_dim(name) is not None)
        }
        self.known: dict[ClientId, AdapterState] = {one.id: dict(drawn) for one in self.federation.clients}
        self.models: dict[ClientId, AdapterState] = {}

    def broadcast(self, round: int, client: ClientId, parcel: bytes) -> bool:
        """Add the change that all clients receive to the frozen weights of a client."""
        known, sent, lora = self.known[client], from_bytes(parcel), self.federation.server.lora
        scaling = lora.effective_scaling if lora else 1.0
        for name, tensor in sent.items():
            if is_folded(name):
                known[name] = known[name] + tensor
            elif ".lora_A." in name:
                left, change = sent[name.replace(".lora_A.", ".lora_B.")].double(), folded_name(name)
                step = scaling * left.flatten(1) @ tensor.double().flatten(1)
                known[change] = (known[change].double() + step).to(tensor.dtype)
        if self.seeded:  # the seed, the round and the names in the stack determine the new factors
            stacked: dict[str, Any] = {"adapter": known, "stack": sent}
            state, trainer = replace(self.untrained, **stacked), self.federation.trainer.at(round)
            known |= self.federation.method.begin_round(state, self.federation.server, trainer).adapter
        return True

    def train(
        self, round: int, client: ClientId, row: LayerAllocation, told: dict[str, Any], parcel: bytes
    ) -> tuple[bytes, bytes, dict[str, Any]]:
        """Train a client, and return its tensors and extra tensors as messages, and the rest of its update."""
        federation, known, received = self.federation, self.known[client], from_bytes(parcel)
        known |= received
        for tensor in federation.model.movable().values():
            tensor.data.fill_(math.nan)  # tensors that the client did not receive
        state = replace(self.untrained, **{**told, **self._models_of(client, received)}, adapter=dict(known))
        cohort = [next(replace(one, rank=row.rank) for one in federation.clients if one.id == client)]
        (update,) = federation.method.local_updates(state, cohort, {client: row}, federation.trainer.at(round))
        self._keep(update)
        rest = {"allocation": update.allocation, "num_examples": update.num_examples, "metrics": dict(update.metrics)}
        return to_bytes(_plain(update.adapter)), to_bytes(_plain(update.extra)), rest

    def _models_of(self, client: ClientId, received: AdapterState) -> dict[str, Any]:
        """Return the fields of the state from which FedMS and FedAG read a client's own model and the received one."""
        own = {client: self.models[client]} if client in self.models else {}
        if isinstance(self.untrained, FedMSState):
            return {"experts": own}
        if isinstance(self.untrained, FedAGState):
            return {"own": own, "copies": {self.untrained.domains[client]: received}}
        return {}

    def _keep(self, update: ClientUpdate) -> None:
        """Store the tensors that a client has trained for itself."""
        if isinstance(self.untrained, FedMSState | FedAGState):
            kept = {**update.private, **update.local_copy}
            self.models[update.client] = {**self.models.get(update.client, {}), **_plain(kept)}
        else:
            self.known[update.client] |= widened(update.private, self.known[update.client])


def serve(end: Connection) -> None:
    """Answer the requests of a `ClientProcess` until it sends None."""
    torch.set_num_threads(1)
    clients: Clients | None = None
    while (words := end.recv()) is not None:
        try:
            if words[0] == "begin":
                clients = Clients(words[1])
                end.send(True)
            else:
                end.send(getattr(clients, words[0])(*words[1:]))
        except Exception as error:
            end.send(f"{type(error).__name__}: {error}")


def _plain(state: AdapterState) -> dict[str, Tensor]:
    return {name: one.detach().contiguous().clone() for name, one in state.items()}


def cell(process: ClientProcess, row: dict[str, Json], column: dict[str, Json], width: int) -> str:
    """Return a cell of the table: the kilobytes that are sent down and up in each round.

    Args:
        process: The process in which the clients train.
        row: The changes of the run for the row.
        column: The changes of the run for the column.
        width: The number of features of the ViT.
    """
    if not applies(config_of(row, width).method, column):
        return "-"
    _, *later = process.play(config_of({**row, **column}, width))
    means = (sum(getattr(one, way) for one in later) / len(later) / 1000 for way in ("down", "up"))
    return " / ".join(dict.fromkeys(f"{mean:,.1f}" for mean in means))


def main() -> None:
    """Print the table and, with `--to`, write it to a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--width", type=int, default=WIDTH)
    parser.add_argument("--to", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    process, cells = ClientProcess(), list[list[str]]()
    for label, row in table_rows().items():
        if row["method"] in given.methods:
            print(label, file=sys.stderr)
            cells.append([label, *(cell(process, row, column, given.width) for column in COLUMNS.values())])
    process.close()
    table = markdown_table(("method", *COLUMNS), cells, [True, *[False] * len(COLUMNS)])
    print(table)
    if given.to is not None:
        given.to.write_text(f"{table}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
