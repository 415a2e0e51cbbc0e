"""LoRA through peft's configuration and layers. The only module that imports peft."""

import math
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Self, cast

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from fedsweep.common.config import Config
from fedsweep.common.randomness import derived_seed
from fedsweep.models.layered import LayeredModel, Position
from fedsweep.models.names import names_within


class LoraConfig(Config):
    """Low-rank adapters W x + s B A x in the last linear of a block's sublayers (FedRA, Eq. 2).

    One of `alpha` and `scaling` is given. With `alpha` fixed, a sweep of the rank also sweeps s = alpha / rank.
    """

    rank: int = Field(8, gt=0, description="rows of A, columns of B")
    alpha: float | None = Field(None, gt=0, description="s = alpha / rank; leave null when `scaling` is given")
    scaling: float | None = Field(None, gt=0, description="s itself; leave null when `alpha` is given")
    position: Position = Field(
        "both",
        description="l0: after attention (token mixing), l1: after the MLP (channel mixing), both; of CLIP also all "
        "linears of mlp, of attention, or all",
    )
    dropout: float = Field(0.1, ge=0, lt=1, description="dropout on the adapter's input")
    patch_embed: bool = Field(False, description="also adapt the patch embedding, as FedRA's released code does")

    @model_validator(mode="after")
    def _one_scale(self) -> Self:
        if (self.alpha is None) == (self.scaling is None):
            given = f"alpha {self.alpha} and scaling {self.scaling}"
            raise ValueError(f"exactly one of `lora.alpha` and `lora.scaling` must be given, but got {given}")
        return self

    @property
    def effective_scaling(self) -> float:
        """The factor s of the adapter's output."""
        return self.scaling if self.scaling is not None else (self.alpha or 0.0) / self.rank


def add_lora(model: LayeredModel, config: LoraConfig, seed: int, freeze_a: bool = False) -> None:
    """Insert adapters in place and make exactly them (with `freeze_a` their B) and the head trainable.

    B starts at zero, A Kaiming-uniform from a stream of its own name, so that a tensor's start does not depend on the
    other tensors that an arm adapts.
    """
    from peft import inject_adapter_in_model

    targets = [
        f"backbone.blocks.{layer}.{place}"
        for layer, block in enumerate(model.backbone.blocks)
        for place in model.positions()[config.position]
        if place.split(".")[0] in dict(block.named_children())  # lower blocks of CLIP's deeper encoder have no partner
    ]
    if config.patch_embed:
        targets.append(model.patch_projection)
    inject_adapter_in_model(_peft_config(config, target_modules=targets), model)
    for name, parameter in model.named_parameters():
        adapter = ".lora_B." in name if freeze_a else ".lora_" in name
        parameter.requires_grad_(adapter or name.startswith(model.head_prefix))
        if ".lora_A." in name:
            generator = torch.Generator().manual_seed(derived_seed(seed, "adapter", name))
            fresh = torch.empty(parameter.shape)
            nn.init.kaiming_uniform_(fresh, a=math.sqrt(5), generator=generator)
            parameter.data.copy_(fresh)


def _peft_config(config: LoraConfig, **more: Any) -> Any:
    from peft import LoraConfig as PeftLoraConfig

    alpha: Any = config.effective_scaling * config.rank  # peft divides it by r again
    return PeftLoraConfig(r=config.rank, lora_alpha=alpha, lora_dropout=config.dropout, bias="none", **more)


def write_adapter(folder: Path, config: LoraConfig, tensors: Mapping[str, Tensor], base: str | None) -> None:
    """Write PEFT's own files: the adapters, and all other tensors as modules that are saved whole.

    Tensors have their names in the plain network, LoRA's with the ending `.lora_A.default.weight`; `base` is its name.
    """
    from safetensors.torch import save_file

    adapted = sorted({name.partition(".lora_")[0] for name in tensors if ".lora_" in name})
    saved = sorted({name.rpartition(".")[0] for name in tensors if ".lora_" not in name})
    peft_config = _peft_config(config, modules_to_save=saved or None, inference_mode=True, base_model_name_or_path=base)
    peft_config.target_modules = adapted  # set later, or peft keeps a set, whose order is another in each process
    peft_config.save_pretrained(str(folder))
    renamed = {
        f"base_model.model.{name.replace('.default.', '.')}": tensor.detach().cpu().contiguous().clone()
        for name, tensor in tensors.items()
    }
    save_file(renamed, folder / "adapter_model.safetensors", {"format": "pt"})


def with_adapter(network: nn.Module, folder: Path) -> nn.Module:
    """Load such a folder into a plain network by PEFT itself, in place, and return it."""
    from peft import PeftModel

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # transformers', of a name that peft asks it for
        return cast(nn.Module, PeftModel.from_pretrained(network, str(folder), torch_device="cpu"))


def train_head_alone(model: LayeredModel) -> None:
    """Freeze all but the head, as methods without adapters start."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith(model.head_prefix))


@torch.no_grad()
def relative_norm(model: LayeredModel, layers: Iterable[int]) -> float:
    """||s B A|| / ||W||: Frobenius norms over all adapted layers of these blocks, and the patch embedding's if adapted.

    It is computed from the adapters that `model` holds now; 0 for untrained ones, and without any.
    """
    added = frozen = 0.0
    names = (name for name, _ in model.named_modules() if name.endswith(".lora_A"))
    for name in names_within(names, layers):
        layer = cast(Any, model.get_submodule(name.removesuffix(".lora_A")))
        a, b = (part["default"].weight.flatten(1).double() for part in (layer.lora_A, layer.lora_B))
        added += layer.scaling["default"] ** 2 * squared_norm(b, a)
        frozen += torch.linalg.vector_norm(layer.base_layer.weight).item() ** 2
    return math.sqrt(added / frozen) if frozen else 0.0


def squared_norm(left: Tensor, right: Tensor) -> float:
    """||left @ right||^2 in the Frobenius norm, without the product: tr(L^T L R R^T)."""
    return max(0.0, ((left.T @ left) * (right @ right.T)).sum().item())
