"""Backbones as embed, blocks and classify: a client can run any subset of the blocks, under their full names."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Literal, TypeAlias, cast

import torch
from torch import Tensor, nn

from fedsweep.common.randomness import derived_seed
from fedsweep.models.names import STATISTICS, layer_of, names_within
from fedsweep.types import AdapterState, Batch

Position = Literal["l0", "l1", "both", "mlp", "attention", "all"]
"""Where adapters sit in a block: in the last linear of the attention (token mixing), of the MLP (channel mixing), or of
both; or in all linears of CLIP's MLP, of its attention, or of both."""
Images: TypeAlias = Tensor | Batch
"""uint8 (n, 3, height, width), or a batch whose first steps may be known."""
Step: TypeAlias = int | Callable[["LayeredModel", Tensor], Tensor]
"""One step of a walk: a block by its number, or what maps (model, tokens) to tokens of the same shape in its place."""
Walk: TypeAlias = Sequence[Step]
"""The steps of a walk in their order. A block that a client skips is not among them."""


class LayeredModel(nn.Module, ABC):
    """A frozen backbone with trainable adapters and head, walked block by block.

    There is one resident model per process: adapters are copied in and out, blocks are never renumbered.
    """

    backbone: Any
    """The network of timm, or the two encoders of a CLIP."""
    class_names: tuple[str, ...] = ()
    """Names of the classes that its logits are of; none on the meta device."""
    head_is_fresh: bool = False
    """Whether the head is none of the weights'."""
    mean: Tensor
    std: Tensor

    def __init__(self, backbone: nn.Module, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        self.backbone = backbone
        self.heads = nn.ModuleDict()  # classifiers beside the backbone's own, by the number of blocks before them
        self.bricks = nn.ModuleDict()  # FedBRICK's stand-ins for every block, by set
        self.register_buffer("mean", torch.tensor(mean).view(-1, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(std).view(-1, 1, 1), persistent=False)

    sublayers: ClassVar[Mapping[str, str]] = {"l0": "attn.proj", "l1": "mlp.fc2"}
    """Within a block, the last linear of each sublayer: where LoRA sits (`l0`, `l1`)."""
    top: ClassVar[tuple[str, ...]] = ("backbone.norm.", "backbone.fc_norm.", "backbone.attn_pool.", "backbone.head")
    """Prefixes of the backbone's names above its blocks."""
    behind: ClassVar[tuple[str, ...]] = (*top, "heads.")
    """Prefixes of names, outside the blocks, of what no block's input depends on."""
    patch_projection: ClassVar[str] = "backbone.patch_embed.proj"
    """The patch embedding's projection."""
    head_prefix: ClassVar[str] = "backbone.head"
    """Prefix of the head's parameter names; without a dot, because a distilled DeiT has `head_dist` too."""

    @abstractmethod
    def embed(self, pixels: Tensor) -> Tensor:
        """Return tokens (batch, tokens, width) of normalised pixels (batch, channels, h, w)."""

    def block(self, layer: int, tokens: Tensor) -> Tensor:
        """Run one block, with its residual connections: (batch, tokens, width) to the same shape."""
        return cast(Tensor, self.backbone.blocks[layer](tokens))

    def classify(self, tokens: Tensor) -> Tensor:
        """Apply the final norm, then timm's `forward_head` (pooling and head): (batch, tokens, width) to logits."""
        return cast(Tensor, self.backbone.forward_head(self.backbone.norm(tokens)))

    def features(self, tokens: Tensor) -> Tensor:
        """Return the head's input, after final norm and timm's pooling: (batch, tokens, width) to (batch, width)."""
        return cast(Tensor, self.backbone.forward_head(self.backbone.norm(tokens), pre_logits=True))

    def draw_head(self, seed: int) -> None:
        """Draw a fresh head, which depends on the seed and the head's names alone."""
        draw_head(((name, one) for name, one in self.named_parameters() if name.startswith(self.head_prefix)), seed)
        self.head_is_fresh = True

    def add_heads(self, depths: Iterable[int], seed: int) -> None:
        """Add fresh trainable classifiers after these numbers of blocks, under `heads.<depth>`."""
        shape = self.backbone.num_features, self.backbone.num_classes
        for depth in sorted(depths):
            head = nn.Linear(*shape, device="meta").to_empty(device="cpu")
            draw_head(head.named_parameters(prefix=f"heads.{depth}"), seed)
            self.heads[str(depth)] = head

    @classmethod
    def positions(cls) -> dict[str, tuple[str, ...]]:
        """Return the places of adapters within a block, by position."""
        return {**{name: (place,) for name, place in cls.sublayers.items()}, "both": tuple(cls.sublayers.values())}

    def exits(self, images: Images, walk: Walk, depths: Sequence[int], last: bool) -> list[Tensor]:
        """Return logits (batch, classes) of the heads after `depths` of the steps; with `last` also the own head's."""
        (tokens, done), logits = self.begin(images), []
        for place, step in enumerate(walk, start=1):
            tokens = tokens if place <= done else self.step(step, tokens)
            if place in depths:
                logits.append(self.heads[str(place)](self.features(tokens)))
        return [*logits, self.classify(tokens)] if last else logits

    @property
    def num_layers(self) -> int:
        """L, the number of blocks of the full model."""
        return len(self.backbone.blocks)

    def normalize(self, images: Tensor) -> Tensor:
        """Return the normalised pixels of uint8 images (batch, 3, h, w), moved to the model's device.

        Images may stay on the host as a memory map. A backbone of one channel sees the mean of the three colours.
        """
        pixels = images.to(self.mean.device, non_blocking=True).to(self.mean.dtype, copy=True).div_(255)
        if len(self.mean) == 1:
            pixels = pixels.mean(1, keepdim=True)
        return standardize_(pixels, self.mean, self.std)

    def forward(self, images: Images, walk: Walk | None = None) -> Tensor:
        """Return logits (batch, classes) of images after these steps, by default all blocks."""
        return self.classify(self.walk(images, range(self.num_layers) if walk is None else walk))

    def walk(self, images: Images, walk: Walk) -> Tensor:
        """Return tokens (batch, tokens, width) of images after the last of these steps."""
        tokens, done = self.begin(images)
        for step in walk[done:]:
            tokens = self.step(step, tokens)
        return tokens

    def begin(self, images: Images) -> tuple[Tensor, int]:
        """Return tokens of images, and the number of steps that they have passed: 0 if none are known."""
        if isinstance(images, Batch):
            if images.tokens is not None:
                return images.tokens.to(self.mean.device, non_blocking=True), images.done
            images = images.images
        return self.embed(self.normalize(images)), 0

    def frozen_steps(self, walk: Walk, trained: Iterable[str]) -> int:
        """Return the number of steps of a walk before the first that training moves, if these tensors are trained.

        >>> LayeredModel.frozen_steps(LayeredModel, (0, 3, 7), ["backbone.blocks.7.mlp.fc2.bias", "backbone.head.bias"])
        2
        """
        layers = set()
        for name in trained:
            if (layer := layer_of(name)) is not None:
                layers.add(layer)
            elif not name.startswith(self.behind):
                return 0
        movable = (place for place, step in enumerate(walk) if not isinstance(step, int) or step in layers)
        return next(movable, len(walk))

    def ahead(self, state: AdapterState, walk: Walk, steps: int) -> AdapterState:
        """Return the tensors of `state` that the first steps depend on; a whole walk includes the model's top."""
        top = self.top if steps == len(walk) else ()
        behind = tuple(prefix for prefix in self.behind if prefix not in top)
        return {name: state[name] for name in names_within(state, cast("Sequence[int]", walk[:steps]), behind)}

    def height(self, name: str) -> tuple[int, int]:
        """Return the index of a tensor's block in its encoder, and the encoder's number of blocks."""
        return cast(int, layer_of(name)), self.num_layers

    def plain_name(self, name: str) -> str:
        """Return a backbone tensor's name in its own library's network, LoRA's as PEFT would insert it."""
        return name.removeprefix("backbone.")

    def cut(self, layers: Sequence[int]) -> dict[str, int]:
        """Return the number of blocks to keep, by list of blocks in the library's network, if the walk ends early."""
        return {} if len(layers) == self.num_layers else {"blocks": len(layers)}

    def passed(self, images: Images, walk: Walk) -> Tensor:
        """Return what a whole frozen walk leaves of images, to be cached: tokens (batch, tokens, width)."""
        return self.walk(images, walk)

    @contextmanager
    def frozen(self, walk: Walk, steps: int) -> Iterator[None]:
        """Hold the first blocks of a walk in evaluation mode: frozen adapters have no dropout."""
        blocks = [self.backbone.blocks[step] for step in walk[:steps]]
        for block in blocks:
            block.eval()
        try:
            yield
        finally:
            for block in blocks:
                block.train(self.training)

    def step(self, step: Step, tokens: Tensor) -> Tensor:
        """Run one step: tokens (batch, tokens, width) to the same shape."""
        return self.block(step, tokens) if isinstance(step, int) else step(self, tokens)

    def trainable(self) -> dict[str, nn.Parameter]:
        """Return the parameters of adapters and head by full name."""
        return {name: parameter for name, parameter in self.named_parameters() if parameter.requires_grad}

    def statistics(self) -> dict[str, Tensor]:
        """Return the running means and variances of the batch norms that are trained."""
        return {
            f"{name}.{one}": cast(Tensor, getattr(module, one))
            for name, module in self.named_modules()
            if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d) and module.weight.requires_grad
            for one in STATISTICS
        }

    def movable(self) -> dict[str, Tensor]:
        """Return all tensors that training moves, by full name: trainable parameters and statistics."""
        return {**self.trainable(), **self.statistics()}

    def adapter(self) -> AdapterState:
        """Return a copy of all tensors that training moves."""
        return {name: tensor.detach().clone() for name, tensor in self.movable().items()}

    def load_adapter(self, state: AdapterState) -> None:
        """Copy tensors into the model; raise KeyError for a name that training does not move."""
        copy_into(self.movable(), state)


def completed(held: Sequence[int], stand_ins: Mapping[int, Step]) -> Walk:
    """Return the walk of a client that holds the blocks `held`, with stand-ins in place of others.

    >>> completed((0, 3), {}), completed((0, 3), {layer: f"E{layer}" for layer in range(4)})
    ((0, 3), (0, 'E1', 'E2', 3))
    """
    return tuple(layer if layer in held else stand_ins[layer] for layer in sorted({*held, *stand_ins}))


def copy_into(parameters: Mapping[str, Tensor], state: AdapterState) -> None:
    """Copy tensors into a model's `parameters`; raise KeyError for a name that is none of theirs."""
    if unknown := sorted(set(state) - set(parameters)):
        raise KeyError(f"not trainable tensors of this model: {', '.join(unknown)}")
    if state:
        with torch.no_grad():
            torch._foreach_copy_([parameters[name] for name in state], list(state.values()))


@torch.no_grad()
def draw_head(parameters: Iterable[tuple[str, nn.Parameter]], seed: int) -> None:
    """Draw truncated normal weights of deviation 0.02, each from a stream of its full name, and zero the biases."""
    for name, parameter in parameters:
        if parameter.ndim > 1:
            generator = torch.Generator().manual_seed(derived_seed(seed, "head", name))
            nn.init.trunc_normal_(parameter, std=0.02, generator=generator)
        else:
            parameter.zero_()


@torch.no_grad()
def draw_linears(layers: nn.Sequential, seed: int, purpose: str, *key: str) -> None:
    """Draw weights in torch's range, from streams of key and place, and zero the biases; not on the meta device."""
    for place, layer in enumerate(layers):
        if isinstance(layer, nn.Linear) and not layer.weight.is_meta:
            generator = torch.Generator().manual_seed(derived_seed(seed, purpose, *key, place))
            nn.init.kaiming_uniform_(layer.weight, a=math.sqrt(5), generator=generator)
            nn.init.zeros_(layer.bias)


def standardize_(pixels: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Compute (pixels - mean) / std in place: allocating memory for each step would take longer than the arithmetic."""
    return pixels.sub_(mean).div_(std)
