"""The network and the optimizer of a pre-training run, and the checkpoint that stores their state.

A checkpoint is a safetensors file with a JSON header.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_bytes
from timm.layers.drop import DropPath
from timm.optim import create_optimizer_v2  # type: ignore[attr-defined]
from timm.scheduler.cosine_lr import CosineLRScheduler
from timm.utils.model_ema import ModelEmaV3
from torch import Tensor, nn
from torchvision.transforms import v2  # type: ignore[import-untyped]

from fedsweep.common.config import flat
from fedsweep.common.errors import UserError
from fedsweep.common.files import write_atomically
from fedsweep.common.randomness import derived_seed
from fedsweep.common.yaml_values import Json
from fedsweep.models import LayeredModel
from fedsweep.models.timm.digits_vit import DigitsViT
from fedsweep.models.timm.transformer_families import LayeredViT
from fedsweep.pretraining.config import AdamWConfig, MixConfig, PretrainConfig, ScheduleConfig


class Network(nn.Module):
    """A network that normalises images in [0, 1] and passes them to a backbone with its head."""

    mean: Tensor
    std: Tensor

    def __init__(self, model: LayeredModel) -> None:
        super().__init__()
        self.backbone = model.backbone
        self.register_buffer("mean", model.mean, persistent=False)
        self.register_buffer("std", model.std, persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits (n, classes) of images (n, 3, h, w) in [0, 1].

        A backbone with one input channel receives the mean of the three colour channels.
        """
        pixels = images.mean(1, keepdim=True) if len(self.mean) == 1 else images
        return cast(Tensor, self.backbone((pixels - self.mean) / self.std))


def build_network(config: PretrainConfig, num_classes: int) -> Network:
    """Return the network, with initial weights drawn from the seed.

    If `config.drop_path` is positive, stochastic depth is added to the blocks. Raise UserError if the backbone does not
    support the number of classes or stochastic depth.
    """
    seed = derived_seed(config.seed, "pretrain/init")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if isinstance(config.backbone, DigitsViT):
            if num_classes != 10:
                raise UserError(
                    "`backbone.name` digits_vit classifies ten digits, "
                    f"but {config.data.set} has {num_classes} classes."
                )
            model: LayeredModel = LayeredViT(config.backbone.architecture(), [0.5] * 3, [0.5] * 3)
        else:
            model = config.backbone.build(num_classes, seed)
    model.requires_grad_(True)
    if config.drop_path:
        _drop_paths(model, config.drop_path)
    return Network(model)


def _drop_paths(model: LayeredModel, rate: float) -> None:
    """Add timm's stochastic depth to all blocks.

    The drop rate rises linearly from 0 in the first block to `rate` in the last block.
    """
    blocks = list(model.backbone.blocks)
    for block, share in zip(blocks, torch.linspace(0, rate, len(blocks)).tolist(), strict=True):
        places = [name for name, _ in block.named_children() if name.startswith("drop_path")]
        if not places:
            raise UserError(
                f"`drop_path` must be 0, because {type(model.backbone).__name__} does not support stochastic depth."
            )
        for place in places:
            setattr(block, place, DropPath(share))


Mix = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""A function of images (n, 3, h, w) and labels (n,) that returns mixed images and class shares (n, classes)."""


def adamw(network: Network, config: AdamWConfig) -> torch.optim.Optimizer:
    """Return an AdamW optimizer that applies weight decay only to weight matrices, as timm does."""
    return create_optimizer_v2(
        network.backbone, "adamw", config.lr, config.weight_decay, betas=config.betas, fused=True
    )


def cosine(optimizer: torch.optim.Optimizer, config: ScheduleConfig, lr: float, steps: int) -> CosineLRScheduler:
    """Return the learning-rate schedule.

    Call its `step_update(k)` before step k, where k counts from 0 to `steps` - 1. During the w steps of warm-up, the
    rate is `lr * (k + 1) / (w + 1)`. Afterwards, it decreases along a cosine from `lr` towards `config.floor`, which it
    would reach at k = `steps`. The rate depends only on k, so checkpoints do not contain the schedule.
    """
    warmup = int(config.warmup * steps)
    return CosineLRScheduler(
        optimizer,
        t_initial=max(steps - warmup, 2),  # timm warns about a cosine of one step
        lr_min=config.floor,
        warmup_t=warmup,
        warmup_lr_init=lr / (warmup + 1),
        warmup_prefix=True,
        t_in_epochs=False,
    )


def mixer(config: MixConfig, num_classes: int) -> Mix | None:
    """Return a function that mixes a batch by MixUp or CutMix, or None if neither is configured.

    If both are configured, one of them is chosen at random for each batch. The function uses torch's global random
    generator.
    """
    parts = ((v2.MixUp, config.mixup), (v2.CutMix, config.cutmix))
    chosen: list[Mix] = [part(alpha=alpha, num_classes=num_classes) for part, alpha in parts if alpha]
    if len(chosen) == 2:
        return v2.RandomChoice(chosen)  # type: ignore[no-any-return]
    return chosen[0] if chosen else None


@dataclass(frozen=True)
class EpochRecord:
    """The results of one epoch; epochs are numbered from 1.

    If a run is repeated on the same CPU, all values except `seconds` are identical.
    """

    epoch: int
    train_loss: float
    accuracy: float
    loss: float
    lr: float
    seconds: float


@dataclass(frozen=True)
class Saved:
    """The contents of a checkpoint, including the tensors that `TrainingState.tensors` returns."""

    history: tuple[EpochRecord, ...]
    config: Mapping[str, Json]
    data_digest: str
    threads: int
    tensors: Mapping[str, Tensor]

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a checkpoint, or raise UserError if the file is damaged or is not a pre-training checkpoint."""
        try:
            with safe_open(path, framework="pt") as file:
                header: dict[str, Any] = file.metadata()
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no mapping)
            history = tuple(EpochRecord(**record) for record in json.loads(header["history"]))
            return cls(history, json.loads(header["config"]), header["data_digest"], int(header["threads"]), tensors)
        except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
            raise UserError(
                f"{path} is not a complete checkpoint of a pre-training ({error}); delete it to start again."
            ) from None

    def check_same(self, path: Path, config: PretrainConfig, data_digest: str) -> None:
        """Raise UserError if the checkpoint was written with another configuration or other images."""
        before, now = flat(self.config), flat(config)
        for name in dict.fromkeys([*now, *before]):
            if before.get(name) != now.get(name):
                old, new = json.dumps(before.get(name)), json.dumps(now.get(name))
                raise UserError(
                    f"{path} was written with `{name}` {old}, but it is {new} now; `--resume` needs the same values."
                )
        if self.data_digest != data_digest:
            raise UserError(
                f"{path} was written with other images: their digest was {self.data_digest[:12]}, "
                f"but the digest of {config.data.set} is {data_digest[:12]} now."
            )


@dataclass
class TrainingState:
    """The network, its optimizer and the moving average of its weights, all of which training changes in place."""

    network: Network
    optimizer: torch.optim.Optimizer
    average: ModelEmaV3 | None

    @classmethod
    def of(cls, config: PretrainConfig, num_classes: int, device: torch.device, saved: Saved | None) -> Self:
        """Return the state in the checkpoint `saved`, or the state before the first step if `saved` is None."""
        network = build_network(config, num_classes).to(device)
        average = None if config.ema_decay is None else ModelEmaV3(network, decay=config.ema_decay, use_warmup=True)
        state = cls(network, adamw(network, config.optimizer), average)
        if saved is None:
            return state
        parts: dict[str, dict[str, Tensor]] = {}
        for name, tensor in saved.tensors.items():
            part, _, rest = name.partition("/")
            parts.setdefault(part, {})[rest] = tensor
        network.load_state_dict(parts.pop("network"))
        if average is not None:
            average.module.load_state_dict(parts.pop("average"))
        for name, parameter in network.named_parameters():
            state.optimizer.state[parameter] = {moment: one[name].to(parameter.device) for moment, one in parts.items()}
        return state

    @property
    def result(self) -> Network:
        """The network that is validated and written to the weights file.

        If `average` is not None, this is the network with the averaged weights.
        """
        return self.network if self.average is None else self.average.module

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors of the state, keyed by name.

        The names begin with `network/`, `average/` or the name of a tensor in AdamW's state, such as `exp_avg/`.
        """
        named = {f"network/{name}": tensor for name, tensor in self.network.state_dict().items()}
        if self.average is not None:
            named |= {f"average/{name}": tensor for name, tensor in self.average.module.state_dict().items()}
        for name, parameter in self.network.named_parameters():
            named |= {f"{moment}/{name}": tensor for moment, tensor in self.optimizer.state[parameter].items()}
        return named

    def save(
        self, path: Path, history: Sequence[EpochRecord], config: PretrainConfig, data_digest: str, threads: int
    ) -> None:
        """Write a checkpoint atomically, with this state and the records of all epochs so far."""
        header = {
            "history": json.dumps([asdict(record) for record in history]),
            "config": config.model_dump_json(),
            "data_digest": data_digest,
            "threads": str(threads),
        }
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in self.tensors().items()}
        write_atomically(path, to_bytes(tensors, header))
