"""LoRA adapters, implemented with PEFT; only this module and `lora_linear` import PEFT."""

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import torch
from pydantic import Field
from torch import Tensor, nn

from fedsweep.common.config import Config
from fedsweep.common.randomness import derived_seed
from fedsweep.common.rules import one_scale
from fedsweep.models.layered import LayeredModel, Position
from fedsweep.models.names import names_within


class LoraConfig(Config):
    """The options of LoRA adapters, which change a linear layer's output from W x to W x + s B A x (FedRA, Eq. 2).

    W is the frozen weight, A and B are the trainable factors, and s is the scaling. Set either `alpha` or `scaling`. If
    `alpha` is fixed, a sweep over ranks also changes the scaling s = alpha / rank.
    """

    rank: int = Field(8, gt=0, description="rank of the adapters: number of rows of A and of columns of B")
    alpha: float | None = Field(
        None, gt=0, description="sets the scaling to s = alpha / rank; null if `scaling` is set"
    )
    scaling: float | None = Field(None, gt=0, description="scaling s of the adapters' output; null if `alpha` is set")
    position: Position = Field(
        "both",
        description="adapted linear layers of each block: `l0` (the last one of the attention or of a Mixer's token "
        "mixing), `l1` (the last one of the MLP or of a Mixer's channel mixing), or `both`; for CLIP also `mlp` or "
        "`attention` (all linear layers of that part), or `all` (the linear layers of both parts)",
    )
    dropout: float = Field(0.1, ge=0, lt=1, description="dropout rate of the adapters' inputs")
    rank_scaling: Literal["held", "over_rank", "over_sqrt_rank"] = Field(
        "held",
        description="scaling of a client whose rank r is smaller than `rank`. `held`: s, the same for all ranks; "
        "`over_rank`: alpha / r; `over_sqrt_rank`: alpha / sqrt(r), also for the full rank (rsLoRA)",
    )
    patch_embed: bool = Field(
        False, description="whether to adapt the patch embedding too, as FedRA's released code does"
    )

    def _violations(self) -> Iterator[str]:
        return one_scale(self)

    @property
    def effective_scaling(self) -> float:
        """The scaling s of the adapters' output at the full rank.

        It is `scaling` if this is set. Otherwise, it is alpha / rank, or alpha / sqrt(rank) with `over_sqrt_rank`.
        """
        return self.scaling if self.scaling is not None else self._from_alpha(self.rank)

    def scaling_of(self, rank: int) -> float:
        """Return the scaling of a client whose adapters have the rank `rank` (see `rank_scaling`)."""
        return self.effective_scaling if self.rank_scaling == "held" else self._from_alpha(rank)

    def _from_alpha(self, rank: int) -> float:
        return (self.alpha or 0.0) / (math.sqrt(rank) if self.rank_scaling == "over_sqrt_rank" else rank)


def add_lora(model: LayeredModel, config: LoraConfig, seed: int, freeze_a: bool = False) -> None:
    """Insert LoRA adapters into a model in place, and make only the adapters and the head trainable.

    Args:
        model: The model.
        config: The configuration of the adapters.
        seed: The seed of the initial values; see `draw_adapters`.
        freeze_a: Whether the factor A is frozen, so that only B is trainable.
    """
    Adapters(config, freeze_a)(model)
    draw_adapters(model, seed)


@dataclass(frozen=True)
class Adapters:
    """LoRA adapters to insert into a model. Their factor A must then be drawn with `draw_adapters`.

    They depend on neither the seed nor the weights, so that a cache can keep a model with adapters for several trials.
    """

    config: LoraConfig
    freeze_a: bool = False
    """True if the factor A is frozen, so that only B is trainable."""

    def __call__(self, model: LayeredModel) -> None:
        """Insert the adapters into the model, and make only the adapters and the head trainable."""
        from peft import inject_adapter_in_model

        from fedsweep.models.lora_linear import LoraLinear, SessionDropout

        config = self.config
        targets = [
            f"backbone.blocks.{layer}.{place}"
            for layer, block in enumerate(model.backbone.blocks)
            for place in model.positions()[config.position]
            if place.split(".")[0] in dict(block.named_children())  # lower blocks of CLIP's deeper encoder: no partner
        ]
        if config.patch_embed:
            targets.append(model.patch_projection)
        peft_config = _peft_config(config, target_modules=targets)
        peft_config._register_custom_module({nn.Linear: LoraLinear})  # PEFT's way to adapt a layer with a class of ours
        inject_adapter_in_model(peft_config, model)
        for name, module in list(model.named_modules()):
            if isinstance(module, LoraLinear):
                module.name, module.session = name, model.session
            elif config.dropout and name.endswith(".lora_dropout"):
                cast(nn.ModuleDict, module)["default"] = SessionDropout(config.dropout, model.session)
        for name, parameter in model.named_parameters():
            adapter = ".lora_B." in name if self.freeze_a else ".lora_" in name
            parameter.requires_grad_(adapter or name.startswith(model.head_prefix))


def draw_adapters(model: LayeredModel, seed: int) -> None:
    """Draw the initial values of a model's adapters in place.

    The factor B keeps its zeros, and A gets Kaiming-uniform values that depend only on the seed and the tensor's name.
    If two arms with the same seed adapt the same layer, the first rows of the layer's factor A are therefore the same
    in both arms, up to the smaller of their ranks (see `initial_a`).
    """
    for name, parameter in model.named_parameters():
        if ".lora_A." in name:
            parameter.data.copy_(initial_a(parameter, seed, "adapter", name))


def initial_a(like: Tensor, seed: int, purpose: str, *key: int | str) -> Tensor:
    """Return Kaiming-uniform values for a factor A, with the shape, type and device of `like`.

    The values depend only on the shape, the seed, and the strings `purpose` and `key` (see `derived_seed`). A factor of
    rank r consists of the first r rows of a factor of a larger rank, so arms of different ranks have common random
    numbers: torch draws the values row by row, and their bound depends only on the length of a row.
    """
    generator = torch.Generator().manual_seed(derived_seed(seed, purpose, *key))
    fresh = torch.empty(like.shape)
    nn.init.kaiming_uniform_(fresh, a=math.sqrt(5), generator=generator)
    return fresh.to(like)


def effective_scaling(config: LoraConfig | None) -> float:
    """Return the scaling s of the adapters at the full rank; 1 without adapters."""
    return 1.0 if config is None else config.effective_scaling


def add_folds(model: LayeredModel) -> None:
    """Let the server fold changes into the frozen weights of the adapted layers; at first, the changes are zero.

    A change (out, in) is added to the weight of its layer. Its name is that of the layer, followed by `.folded`. Only
    linear layers have changes, so the patch embedding must not be adapted.
    """
    from fedsweep.models.lora_linear import LoraLinear

    for layer in model.modules():
        if isinstance(layer, LoraLinear):
            weight = cast(nn.Linear, layer.base_layer).weight
            layer.register_buffer("folded", torch.zeros_like(weight, requires_grad=False))


def _peft_config(config: LoraConfig, **more: Any) -> Any:
    from peft import LoraConfig as PeftLoraConfig

    alpha: Any = config.effective_scaling * config.rank  # PEFT divides it by the rank again
    return PeftLoraConfig(r=config.rank, lora_alpha=alpha, lora_dropout=config.dropout, bias="none", **more)


def write_adapter(folder: Path, config: LoraConfig, tensors: Mapping[str, Tensor], base: str | None) -> None:
    """Write an adapter in PEFT's file format.

    Args:
        folder: The folder to write to.
        config: The configuration of the adapter.
        tensors: The LoRA factors and all tensors of the other trained modules, keyed by their names in timm or
            transformers. The names of LoRA factors end in `.lora_A.default.weight` or `.lora_B.default.weight`.
        base: The name under which timm or transformers provides the network's weights, or None.
    """
    from safetensors.torch import save_file

    adapted = sorted({name.partition(".lora_")[0] for name in tensors if ".lora_" in name})
    saved = sorted({name.rpartition(".")[0] for name in tensors if ".lora_" not in name})
    peft_config = _peft_config(config, modules_to_save=saved or None, inference_mode=True, base_model_name_or_path=base)
    # Given earlier, PEFT would convert the list to a set, whose order varies between processes.
    peft_config.target_modules = adapted
    peft_config.save_pretrained(str(folder))
    renamed = {
        f"base_model.model.{name.replace('.default.', '.')}": tensor.detach().cpu().contiguous().clone()
        for name, tensor in tensors.items()
    }
    save_file(renamed, folder / "adapter_model.safetensors", {"format": "pt"})


def with_adapter(network: nn.Module, folder: Path) -> nn.Module:
    """Add an adapter to a timm or transformers network in place, and return the network.

    The adapter is read from `folder`, where `write_adapter` wrote it.
    """
    from peft import PeftModel

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # transformers warns of a name that PEFT uses
        return cast(nn.Module, PeftModel.from_pretrained(network, str(folder), torch_device="cpu"))


def train_head_alone(model: LayeredModel) -> None:
    """Freeze all parameters except the head, for methods without adapters."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith(model.head_prefix))


@torch.no_grad()
def relative_norm(model: LayeredModel, layers: Iterable[int]) -> float:
    """Return ||s B A|| / ||W||, the norm of LoRA's changes divided by the norm of the frozen weights.

    s is LoRA's scaling, A and B are the factors that the model currently holds, and W is the frozen weight. A change
    that the server folded into W is added to s B A. The Frobenius norms are taken over all adapted layers in the blocks
    `layers`, and over the patch embedding if it is adapted. The result is 0 if no layer is adapted.
    """
    added = frozen = 0.0
    names = (name for name, _ in model.named_modules() if name.endswith(".lora_A"))
    for name in names_within(names, layers):
        layer = cast(Any, model.get_submodule(name.removesuffix(".lora_A")))
        a, b = (part["default"].weight.flatten(1).double() for part in (layer.lora_A, layer.lora_B))
        if (folded := getattr(layer, "folded", None)) is None:
            added += layer.scaling["default"] ** 2 * squared_norm(b, a)
        else:
            added += torch.linalg.vector_norm(folded.double() + layer.scaling["default"] * b @ a).item() ** 2
        frozen += torch.linalg.vector_norm(layer.base_layer.weight).item() ** 2
    return math.sqrt(added / frozen) if frozen else 0.0


def squared_norm(left: Tensor, right: Tensor) -> float:
    """Return the squared Frobenius norm of L R, for L (m, k) and R (k, n).

    For a small k, the norm is computed as tr(L^T L R R^T), without computing L R. This takes k^2 (m + n) products, and
    computing L R takes only k m n, so that the work stays linear in k, the number of clients times the rank.
    """
    (m, k), n = left.shape, right.shape[1]
    if k * (m + n) > m * n:
        return (left @ right).square().sum().item()
    return max(0.0, ((left.T @ left) * (right @ right.T)).sum().item())
