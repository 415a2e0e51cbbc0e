"""What a pre-training must remember between epochs, and its file: safetensors with a JSON header."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_bytes
from timm.utils.model_ema import ModelEmaV3
from torch import Tensor

from fedsweep.common.config import flat
from fedsweep.common.errors import UserError
from fedsweep.common.files import write_atomically
from fedsweep.common.yaml_values import Json
from fedsweep.pretraining.config import PretrainConfig
from fedsweep.pretraining.network import Network, adamw


@dataclass(frozen=True)
class EpochRecord:
    """What an epoch, counted from 1, came to. `seconds` is the one thing that repetition changes."""

    epoch: int
    train_loss: float
    accuracy: float
    loss: float
    lr: float
    seconds: float


@dataclass(frozen=True)
class Saved:
    """A checkpoint as it was read. `tensors` are named as `TrainingState.tensors` names them."""

    history: tuple[EpochRecord, ...]
    config: Mapping[str, Json]
    data_digest: str
    threads: int
    tensors: Mapping[str, Tensor]


@dataclass
class TrainingState:
    """The network, its optimizer and the average of its weights; changed in place by training."""

    network: Network
    optimizer: torch.optim.AdamW
    average: ModelEmaV3 | None

    @classmethod
    def fresh(cls, network: Network, config: PretrainConfig) -> "TrainingState":
        """Before the first step."""
        average = None
        if config.ema_decay is not None:
            average = ModelEmaV3(network, decay=config.ema_decay, use_warmup=True)
        return cls(network, adamw(network, config.optimizer), average)

    @property
    def result(self) -> Network:
        """The network to validate and to write: the average where there is one."""
        return self.network if self.average is None else self.average.module

    def tensors(self) -> dict[str, Tensor]:
        """All tensors by name: `network/`, `average/`, and for each moment of AdamW `<moment>/`."""
        named = {f"network/{name}": tensor for name, tensor in self.network.state_dict().items()}
        if self.average is not None:
            named |= {f"average/{name}": tensor for name, tensor in self.average.module.state_dict().items()}
        for name, parameter in self.network.named_parameters():
            named |= {f"{moment}/{name}": tensor for moment, tensor in self.optimizer.state[parameter].items()}
        return named

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy what `tensors` returned once, in whatever device's memory, back into this state."""
        below: dict[str, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            part, _, rest = name.partition("/")
            below.setdefault(part, {})[rest] = tensor
        self.network.load_state_dict(below.pop("network"))
        if self.average is not None:
            self.average.module.load_state_dict(below.pop("average"))
        for name, parameter in self.network.named_parameters():
            moments = {moment: named[name].to(parameter.device) for moment, named in below.items()}
            self.optimizer.state[parameter] = moments

    def save(
        self,
        path: Path,
        history: tuple[EpochRecord, ...],
        config: PretrainConfig,
        data_digest: str,
        threads: int,
    ) -> None:
        """Write the checkpoint as a whole or not at all."""
        header = {
            "history": json.dumps([asdict(record) for record in history]),
            "config": config.model_dump_json(),
            "data_digest": data_digest,
            "threads": str(threads),
        }
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in self.tensors().items()}
        write_atomically(path, to_bytes(tensors, header))


def read_saved(path: Path) -> Saved:
    """Read a checkpoint.

    Raises:
        UserError: it is not a whole checkpoint of a pre-training.
    """
    try:
        with safe_open(path, framework="pt") as file:
            header: dict[str, Any] = file.metadata()
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no mapping)
        history = tuple(EpochRecord(**record) for record in json.loads(header["history"]))
        config: dict[str, Json] = json.loads(header["config"])
        return Saved(history, config, header["data_digest"], int(header["threads"]), tensors)
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{path} is not a whole checkpoint of a pre-training ({error}); delete it to start anew."
        ) from None


def check_same(saved: Saved, path: Path, config: PretrainConfig, data_digest: str) -> None:
    """Refuse to go on with another configuration or other images.

    Raises:
        UserError: the first hyperparameter that differs, with both values.
    """
    then, now = flat(saved.config), flat(config)
    for name in dict.fromkeys([*now, *then]):
        if then.get(name) != now.get(name):
            raise UserError(
                f"{path} was made with `{name}` {json.dumps(then.get(name))}, but it is {json.dumps(now.get(name))} "
                "now; `--resume` needs the same values."
            )
    if saved.data_digest != data_digest:
        raise UserError(
            f"{path} was made with other images: their digest was {saved.data_digest[:12]}, "
            f"but that of {config.data.set} is {data_digest[:12]} now."
        )
