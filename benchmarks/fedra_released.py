"""FedRA's released code and fedsweep side by side on the CPU: the same numbers after a round, time and memory.

    git clone https://github.com/leondada/FedRA DIR
    uv run python benchmarks/fedra_released.py --code DIR
    uv run python benchmarks/fedra_released.py --code DIR --out benchmarks/results/NAME.json

ViT-Ti/16 at 224 px with random weights, six clients of 12 to 3 blocks. Agreement: two rounds from the same adapters and
heads, with the same allocations and the same images in the same batches; fedsweep does what the released code does and
the paper does not say (LoRA in the patch embedding, uniform weights, the cap on local steps; DepthFL's places of heads,
ramp and one last head for all). Dropout is off there, for its masks cannot be matched. The exit status is 1 where a
tensor differs by more than the tolerance, or did not move. Speed and memory: FedRA with dropout as released, all sides
in turn at every client, on one thread; memory in a process of its own.
"""

import argparse
import hashlib
import importlib
import json
import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from datetime import date
from functools import partial
from importlib.metadata import version
from operator import mul
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from fedsweep.aggregation import AggregationConfig
from fedsweep.base_optimizer import FedAvg
from fedsweep.evaluation import EvaluationConfig, evaluate
from fedsweep.methods import FederatedMethod, Server
from fedsweep.methods.depthfl import DepthFL
from fedsweep.methods.fedra import FedRA
from fedsweep.methods.inclusivefl import InclusiveFL
from fedsweep.models import LoraConfig, TimmBackbone, build_model
from fedsweep.training import CohortTrainer, LocalConfig, OptimizerConfig
from fedsweep.types import AdapterState, Client, ClientId, ClientUpdate, Domain, ImageSet, LayerAllocation

DEPTHS = (12, 10, 8, 6, 4, 3)
EVERYONE = list(range(len(DEPTHS)))
LAYERS, WIDTH, HEADS = 12, 192, 3
PIXELS, CLASSES, BATCH, TESTED, EVALUATIONS = 224, 10, 8, 16, 4
UNEQUAL, EQUAL = (32, 20, 16, 24, 16, 28), (16,) * 6  # images of each client: for agreement, for speed
MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)  # CLIP's, as released
RATE, TOLERANCE = 0.01, 1e-5
RAMP = 500  # rounds until DepthFL's distillation has its full weight, as released
PLAYED = (0, 400)  # rounds: in the second one DepthFL's distillation has most of its weight
SOURCES = ("client.py", "server.py", "utils.py", "models/GetModel.py", "models/structure.py")

Batch = tuple[Tensor, Tensor]
"""Images or their normalised pixels, and labels."""

console = Console(stderr=True, highlight=False)


class Fedsweep:
    """Our side: the model, the clients and their images."""

    def __init__(
        self, method: FederatedMethod, dropout: float, images: Sequence[int], patch_embed: bool = True
    ) -> None:
        self.method = method
        backbone = TimmBackbone(model="vit_tiny_patch16_224", pretrained="none", mean=MEAN, std=STD)
        lora = LoraConfig(rank=8, alpha=8, dropout=dropout, patch_embed=patch_embed)
        self.model = build_model(backbone, lora, CLASSES, seed=0)
        method.prepare(self.model, set(DEPTHS), seed=0)
        generator = torch.Generator().manual_seed(0)
        for name, parameter in self.model.named_parameters():
            # timm's fresh weights and a B of zeros hardly move anything in a few steps: nothing would be compared.
            if parameter.ndim > 1 and ".lora_A." not in name:
                std = 0.02 if ".lora_B." in name or "embed" in name else 1.5 * parameter[0].numel() ** -0.5
                parameter.data.normal_(std=std, generator=generator)
        self.clients = [
            Client(str(number), str(number), _images(generator, count), depth)
            for number, (depth, count) in enumerate(zip(DEPTHS, images, strict=True))
        ]
        self.test = _images(generator, TESTED)
        self.server = Server(LAYERS, AggregationConfig(weights="uniform"))
        self.trainer = CohortTrainer(
            self.model,
            OptimizerConfig(lr=RATE, momentum=0.9, weight_decay=1e-5, clip_norm=10),
            FedAvg(),
            LocalConfig(batch_size=BATCH, steps="min_client"),
            seed=0,
            rounds=RAMP,
            fewest=min(images),
        )
        self.state = method.init(self.model, self.clients, self.server)

    def weights(self) -> dict[str, Tensor]:
        """The frozen weights in timm's naming, without the head."""
        tensors = {name.removeprefix("backbone."): tensor for name, tensor in self.model.state_dict().items()}
        plain = {name.replace(".base_layer", ""): tensor for name, tensor in tensors.items()}
        return {name: tensor for name, tensor in plain.items() if ".lora_" not in name and "head" not in name}

    def allocate(self, number: int) -> dict[ClientId, LayerAllocation]:
        """The method's own allocations of a round."""
        return self.method.allocate(self.state, self.clients, self.server, np.random.default_rng(number))

    def train(self, number: int, rows: Mapping[ClientId, LayerAllocation], cohort: list[Client]) -> list[ClientUpdate]:
        """The sessions of some of the clients."""
        return self.method.local_updates(self.state, cohort, rows, self.trainer.at(number + 1))

    def aggregate(self, updates: list[ClientUpdate]) -> None:
        """The end of a round."""
        self.state = self.method.aggregate(self.state, updates, self.server)

    def play(self, number: int, matrix: np.ndarray | None) -> list[list[Batch]]:
        """A round with this matrix, or the method's own: the batches that each client saw."""
        rows = self.allocate(number)
        if matrix is not None:
            given = [LayerAllocation.of(np.flatnonzero(row).tolist()) for row in matrix]
            rows = dict(zip(rows, given, strict=True))
        seen: list[list[Batch]] = [[] for _ in self.clients]
        cohort = [
            replace(client, train=_Watched(client.train.images, client.train.labels, taken=taken))
            for client, taken in zip(self.clients, seen, strict=True)
        ]
        self.aggregate(self.train(number, rows, cohort))
        return seen

    def evaluate(self) -> None:
        """An evaluation of the global model."""
        self.model.load_adapter(self.state.adapter)
        domains, config = [Domain("test", self.test, self.test)], EvaluationConfig(batch_size=BATCH)
        evaluate(lambda images: self.method.predict(self.state, self.model, images), domains, config)


@dataclass(frozen=True)
class _Watched(ImageSet):
    """Images that remember which of them were taken."""

    taken: Any = None

    def take(self, index: Tensor) -> tuple[Tensor, Tensor]:
        batch = super().take(index)
        self.taken.append(batch)
        return batch


def _images(generator: torch.Generator, count: int) -> ImageSet:
    """Random colours in squares of 16 pixels."""
    coarse = torch.randint(256, (count, 3, PIXELS // 16, PIXELS // 16), dtype=torch.uint8, generator=generator)
    labels = torch.randint(CLASSES, (count,), generator=generator)
    return ImageSet(coarse.repeat_interleave(16, 2).repeat_interleave(16, 3), labels)


def normalised(batches: Iterable[Batch]) -> list[Batch]:
    """What the released code's loaders give: images through torchvision's ToTensor and Normalize."""
    mean, std = torch.tensor(MEAN).view(-1, 1, 1), torch.tensor(STD).view(-1, 1, 1)
    return [((images.float() / 255 - mean) / std, labels) for images, labels in batches]


class Released:
    """Their side: their server and their clients, each with a model of its own, driven as their main loop does."""

    def __init__(self, code: Path, weights: dict[str, Tensor], dropout: float, heads_every: int = 0) -> None:
        with _released_modules(code) as (client, server, utils, builder):
            self._evaluation = utils.evaluation
            # They run on a GPU's ViT-B/16 with weights from the hub, and set LoRA's dropout in the code.
            builder.VPT_ViT = partial(builder.VPT_ViT, embed_dim=WIDTH, num_heads=HEADS)
            builder.timm = SimpleNamespace(
                create_model=lambda name, pretrained: SimpleNamespace(state_dict=lambda: weights)
            )
            client.tqdm = utils.tqdm = lambda items: items
            for module in (client, server):
                module.LoraConfig = _with_dropout(module.LoraConfig, dropout)
            args = SimpleNamespace(domains=len(DEPTHS), clients_for_eachdomain=1)
            heads: dict[str, Any] = {"num_classes": CLASSES, "depth_cls": heads_every}
            self.server = server.Server(num_layers=LAYERS, args=args, clayers=DEPTHS, **heads)
            self.clients = [client.Client([], num_layers=depth, **heads) for depth in DEPTHS]

    def load(self, adapter: AdapterState) -> None:
        """Give the server these adapters and head."""
        unknown = self.server.global_model.load_state_dict(
            {_their_name(name): tensor for name, tensor in adapter.items()}, strict=False
        ).unexpected_keys
        if unknown:
            raise KeyError(f"not tensors of the released model: {', '.join(unknown)}")

    def adapter(self, names: Sequence[str]) -> AdapterState:
        """The server's adapters and head under our names."""
        tensors = self.server.global_model.state_dict()
        return {name: tensors[_their_name(name)].clone() for name in names}

    def train(
        self, place: int, comparison: "Comparison", number: int, part: dict[str, Tensor], loaders: list[list[Batch]]
    ) -> None:
        """A client's session, from what the server dealt."""
        client = self.clients[place]
        client.load_para(part)
        client.dataloader = loaders[place]
        comparison.train(client, self.server, number, min(map(len, loaders)))

    def aggregate(self, comparison: "Comparison") -> None:
        """The end of a round."""
        comparison.aggregate(self.server, [client.get_para() for client in self.clients])

    def evaluate(self, loader: list[Batch]) -> None:
        """An evaluation of the global model."""
        self._evaluation(self.server.global_model, [loader])


@contextmanager
def _released_modules(code: Path) -> Iterator[list[Any]]:
    """Their modules, fresh. Only while they are imported do their common names stand in the path."""
    import peft  # noqa: F401  # before theirs: one of their folders is called like a package that it asks for

    names = ("client", "server", "utils", "models.GetModel")
    with patch.object(sys, "path", [str(code), *sys.path]), patch.dict(sys.modules):
        for name in ("client", "server", "utils", "models"):
            sys.modules.pop(name, None)
        modules = [importlib.import_module(name) for name in names]
    yield modules


def _with_dropout(config: Callable[..., Any], dropout: float) -> Callable[..., Any]:
    return lambda **options: config(**options | {"lora_dropout": dropout})


def _their_name(name: str) -> str:
    """The full model's names differ in their beginning; heads between blocks are numbered."""
    if name.startswith("heads."):
        _, depth, tensor = name.split(".")
        return f"back.base_model.model.mid_head.{BETWEEN.index(int(depth))}.{tensor}"
    return f"back.base_model.model.{name.removeprefix('backbone.')}"


@dataclass(frozen=True)
class Comparison:
    """A method of ours, and how the released main loop plays it.

    `deal(server, round)` gives what each client loads, and the allocation matrix where it was drawn;
    `train(client, server, round, fewest)` and `aggregate(server, updates)` call theirs.
    """

    method: FederatedMethod
    deal: Callable[[Any, int], tuple[list[dict[str, Tensor]], np.ndarray | None]]
    train: Callable[[Any, Any, int, int], None]
    aggregate: Callable[[Any, list[dict[str, Tensor]]], None]
    heads_every: int = 0


def _deal_random(server: Any, number: int) -> tuple[list[dict[str, Tensor]], np.ndarray]:
    np.random.seed(number)  # theirs draws from the global stream
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


BETWEEN = (4, 7, 10)
COMPARISONS = {
    "fedra": Comparison(FedRA(), _deal_random, _train_plain, _fill),
    "inclusivefl": Comparison(InclusiveFL(beta=0), _deal_prefixes, _train_plain, _average),  # as their loop plays it
    "depthfl": Comparison(
        DepthFL(heads=BETWEEN, own_head="shared", prediction="last", ramp=1.0),
        _deal_prefixes,
        _train_heads,
        _average,
        heads_every=3,
    ),
}


def agreement(code: Path, comparison: Comparison) -> list[dict[str, dict[str, float]]]:
    """After each round, by group of tensors: the largest difference, and how far the tensors moved from the start."""
    ours = Fedsweep(comparison.method, 0.0, UNEQUAL)
    theirs = Released(code, ours.weights(), 0.0, comparison.heads_every)
    start = ours.state.adapter
    theirs.load(start)
    found = []
    for number in PLAYED:
        parts, matrix = comparison.deal(theirs.server, number)
        loaders = [_whole_epoch(*one) for one in zip(ours.play(number, matrix), UNEQUAL, strict=True)]
        for place, part in enumerate(parts):
            theirs.train(place, comparison, number, part, loaders)
        theirs.aggregate(comparison)
        groups: dict[str, dict[str, float]] = {}
        for name, tensor in theirs.adapter(list(start)).items():
            group = groups.setdefault(_group(name), {"tensors": 0, "difference": 0.0, "moved": 0.0})
            group["tensors"] += 1
            # Not by max(a, b), which a NaN would pass.
            for key, other in (("difference", ours.state.adapter[name]), ("moved", start[name])):
                group[key] = np.maximum(group[key], (tensor - other).abs().max().item()).item()
        found.append(groups)
    return found


def _whole_epoch(seen: list[Batch], images: int) -> list[Batch]:
    """A loader of what a client of ours saw; what lies beyond the cap on steps would spoil whoever looks at it."""
    epoch = math.ceil(images / BATCH)
    if len(seen) != min(epoch, math.ceil(min(UNEQUAL) / BATCH) + 1):
        raise RuntimeError(f"{len(seen)} batches of a client with {images} images were seen")
    batches = normalised(seen)
    beyond = torch.full_like(batches[0][0], math.nan), batches[0][1]
    return batches + [beyond] * (epoch - len(seen))


def _group(name: str) -> str:
    """The tensor's place in any block, e.g. `attn.proj.lora_A`."""
    parts = name.removesuffix(".weight").removesuffix(".default").removeprefix("backbone.").split(".")
    return ".".join(part for part in parts if part != "blocks" and not part.isdigit())


def agree(groups: dict[str, dict[str, float]]) -> bool:
    """Whether all differences are within the tolerance, of tensors that moved by far more than that."""
    return all(one["difference"] <= TOLERANCE and one["moved"] > 10 * TOLERANCE for one in groups.values())


SIDES = ("released", "fedsweep", "fedsweep, paper")
"""The last without LoRA in the patch embedding, as the paper has it and fedsweep by default."""


Step = tuple[str, Callable[[], object]]
"""A part of a round, named by what it counts as."""


def player(side: str, code: Path) -> Callable[[int], Iterator[Step]]:
    """A function that gives the steps of a round of FedRA on one side; all sides have the same ones."""
    comparison = COMPARISONS["fedra"]
    ours = Fedsweep(comparison.method, 0.1, EQUAL, patch_embed=side != "fedsweep, paper")
    return _player_released(code, comparison, ours) if side == "released" else partial(_play_ours, ours)


def _play_ours(ours: Fedsweep, number: int) -> Iterator[Step]:
    rows: dict[ClientId, LayerAllocation] = {}
    updates: list[ClientUpdate] = []
    yield "server", lambda: rows.update(ours.allocate(number))
    for client in ours.clients:
        yield "training", partial(lambda one: updates.extend(ours.train(number, rows, [one])), client)
    yield "server", lambda: ours.aggregate(updates)
    yield from [("evaluation", ours.evaluate)] * EVALUATIONS


def _player_released(code: Path, comparison: Comparison, ours: Fedsweep) -> Callable[[int], Iterator[Step]]:
    theirs = Released(code, ours.weights(), 0.1)
    theirs.load(ours.state.adapter)
    test = normalised(ours.test.batches(BATCH))
    loaders = [normalised(client.train.batches(BATCH)) for client in ours.clients]

    def play(number: int) -> Iterator[Step]:
        parts: list[dict[str, Tensor]] = []
        yield "server", lambda: parts.extend(comparison.deal(theirs.server, number)[0])
        for place in EVERYONE:
            yield "training", partial(lambda one: theirs.train(one, comparison, number, parts[one], loaders), place)
        yield "server", lambda: theirs.aggregate(comparison)
        yield from [("evaluation", lambda: theirs.evaluate(test))] * EVALUATIONS

    return play


def time_in_turn(code: Path, repeats: int) -> dict[str, dict[str, dict[str, float]]]:
    """CPU times of each side, from the median and the least of each step over the rounds but the first.

    The sides take turns at every step, so that what else the machine does meets them alike.
    """
    sides = {side: player(side, code) for side in SIDES}
    seconds: dict[str, list[list[float]]] = {side: [] for side in SIDES}
    kinds: list[str] = []
    for number in range(repeats + 1):
        rounds: dict[str, list[float]] = {side: [] for side in SIDES}
        kinds = []
        for steps in zip(*(play(number) for play in sides.values()), strict=True):
            kinds.append(steps[0][0])
            for side, (kind, step) in zip(SIDES, steps, strict=True):
                with console.status(f"round {number}, {kind}: {side}"):
                    begun = time.process_time()
                    step()
                    rounds[side].append(time.process_time() - begun)
        if number:
            for side in SIDES:
                seconds[side].append(rounds[side])
    return {
        name: {side: _times(kinds, of(np.array(found), axis=0)) for side, found in seconds.items()}
        for name, of in (("median", np.median), ("least", np.min))
    }


def _times(kinds: list[str], seconds: np.ndarray) -> dict[str, float]:
    spent = {kind: float(seconds[np.array(kinds) == kind].sum()) for kind in kinds}
    return {
        "training_ms_per_layer_sample": 1000 * spent["training"] / sum(map(mul, DEPTHS, EQUAL)),
        "server_ms_per_round": 1000 * spent["server"],
        "evaluation_ms_per_image": 1000 * spent["evaluation"] / (TESTED * EVALUATIONS),
    }


def high_water() -> float:
    """The most MiB that this process has had in memory."""
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith("VmHWM:")) / 1024


def memory(code: Path) -> dict[str, float]:
    """Peak MiB of a process that plays a round of one side, and of one that only imports."""
    peaks = {}
    for side in ("nothing", "released", "fedsweep"):
        command = [sys.executable, __file__, "--code", str(code), "--peak-of", side]
        peaks[side] = float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return peaks


def show(figures: dict[str, Any]) -> None:
    """The tables."""
    out = Console(highlight=False)
    table = Table("method", "tensors", "", *(f"round {n}" for n in PLAYED), "moved", title="Largest differences")
    for method, rounds in figures["agreement"].items():
        for group, last in rounds[-1].items():
            differences = [f"{one[group]['difference']:.1e}" for one in rounds]
            table.add_row(method, group, str(last["tensors"]), *differences, f"{last['moved']:.1e}")
        table.add_section()
    out.print(table)
    if "cpu" not in figures:
        return
    names = {
        "training_ms_per_layer_sample": "training, ms / (layer x image)",
        "server_ms_per_round": "server, ms per round",
        "evaluation_ms_per_image": "evaluation, ms / image",
    }
    table = Table("median (least)", *SIDES, title="CPU time on one thread, and memory")
    for key, label in names.items():
        median, least = (figures["cpu"][which] for which in ("median", "least"))
        table.add_row(label, *(f"{median[side][key]:.2f} ({least[side][key]:.2f})" for side in SIDES))
    peaks = figures["peak_mib"]
    above = [f"{peaks[side] - peaks['nothing']:.0f}" if side in peaks else "" for side in SIDES]
    table.add_row("peak above imports, MiB", *above)
    out.print(table)


def main() -> None:
    """Compare, time, measure, print, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--code", type=Path, required=True, help="a clone of the authors' repository")
    parser.add_argument("--repeats", type=int, default=3, help="timed rounds of each side; 0 for agreement alone")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--peak-of", choices=["nothing", *SIDES], help=argparse.SUPPRESS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    code = given.code.resolve()
    if missing := [name for name in SOURCES if not (code / name).is_file()]:
        parser.error(f"--code {given.code} has no {', '.join(missing)}")
    # Theirs moves everything to a GPU.
    with (
        patch.object(torch.Tensor, "cuda", lambda tensor: tensor),
        patch.object(torch.nn.Module, "cuda", lambda module: module),
    ):
        if given.peak_of:
            if given.peak_of != "nothing":
                for _, step in player(given.peak_of, code)(0):
                    step()
            print(high_water())
            return
        compared = {}
        for name, comparison in COMPARISONS.items():
            with console.status(f"agreement: {name}"):
                compared[name] = agreement(code, comparison)
        timed = {"cpu": time_in_turn(code, given.repeats), "peak_mib": memory(code)} if given.repeats else {}
    figures: dict[str, Any] = {
        "date": date.today().isoformat(),
        "machine": f"{os.cpu_count()} x {platform.machine()}, one thread",
        "versions": {name: version(name) for name in ("torch", "timm", "peft", "fedsweep")},
        "code_sha256": hashlib.sha256(b"".join((code / name).read_bytes() for name in SOURCES)).hexdigest(),
        "settings": {
            "model": "vit_tiny_patch16_224, random weights",
            "depths": DEPTHS,
            "images_per_client": {"agreement": UNEQUAL, "speed": EQUAL},
            "batch_size": BATCH,
            "rounds": PLAYED,
            "lr": RATE,
            "dropout": {"agreement": 0.0, "speed": 0.1},
            "tolerance": TOLERANCE,
            "repeats": given.repeats,
        },
        "agreement": compared,
        **timed,
    }
    show(figures)
    if given.out:
        given.out.write_text(json.dumps(figures, indent=2) + "\n")
    if not all(agree(groups) for rounds in compared.values() for groups in rounds):
        console.print(f"The two sides differ by more than {TOLERANCE:g}, or a tensor did not move.")
        sys.exit(1)


if __name__ == "__main__":
    main()
