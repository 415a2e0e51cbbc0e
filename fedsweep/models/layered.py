"""Backbones that run block by block, so that a client can run any subset of the blocks.

A forward pass consists of an embedding, a walk and a classifier. A walk is a sequence of steps. Each step is a block or
a stand-in, which is a small module that replaces a missing block.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Literal, TypeAlias, cast

import torch
from torch import Tensor, nn

from fedsweep.models.initial_values import draw_head
from fedsweep.models.names import STATISTICS, is_folded, layer_of, names_within
from fedsweep.models.sessions import Session
from fedsweep.types import AdapterState, Batch

Position = Literal["l0", "l1", "both", "mlp", "attention", "all"]
"""The linear layers of a block that have adapters.

- `l0`: the last linear layer of the attention (or of the token mixing)
- `l1`: the last linear layer of the MLP (or of the channel mixing)
- `both`: `l0` and `l1`
- `mlp`, `attention`, `all`, for CLIP only: all linear layers of the MLP, of the attention, or of both
"""
Images: TypeAlias = Tensor | Batch
"""uint8 images (n, 3, height, width), or a batch, which may contain cached outputs of the first blocks."""
Step: TypeAlias = int | Callable[["LayeredModel", Tensor], Tensor]
"""One step of a forward pass: the number of a block, or a function of the model and tokens that replaces a block."""
Walk: TypeAlias = Sequence[Step]
"""The steps of a forward pass, in order, without the blocks that a client skips."""


class LayeredModel(nn.Module, ABC):
    """A model that runs block by block: a frozen backbone with trainable adapters and a trainable head.

    A process holds one full model, and copies the tensors of one client at a time into the model. A client that holds
    only some blocks uses the block numbers of the full model.
    """

    backbone: Any  # the network of timm, or the two encoders of CLIP
    class_names: tuple[str, ...] = ()
    """The names of the classes, in the order of the logits; empty on the meta device."""
    session: Session  # the local sessions that train at the moment; the adapted layers share this object
    head_is_fresh: bool = False  # whether the head has random initial values instead of pre-trained weights
    mean: Tensor
    std: Tensor

    def __init__(self, backbone: nn.Module, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        self.backbone = backbone
        self.session = Session()
        self.heads = nn.ModuleDict()  # additional classifiers, keyed by the number of blocks before them
        self.bricks = nn.ModuleDict()  # BRICKs, FedBRICK's small replacements for blocks, keyed by set of BRICKs
        self.register_buffer("mean", torch.tensor(mean).view(-1, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(std).view(-1, 1, 1), persistent=False)

    sublayers: ClassVar[Mapping[str, str]] = {"l0": "attn.proj", "l1": "mlp.fc2"}
    """The last linear layer of each sublayer of a block, by LoRA position."""
    top: ClassVar[tuple[str, ...]] = ("backbone.norm.", "backbone.fc_norm.", "backbone.attn_pool.", "backbone.head")
    """Prefixes of the names of the backbone's tensors after the last block."""
    behind: ClassVar[tuple[str, ...]] = (*top, "heads.")
    """Prefixes of the names of tensors outside the blocks that do not influence any block's input."""
    patch_projection: ClassVar[str] = "backbone.patch_embed.proj"
    """The name of the patch embedding's projection."""
    head_prefix: ClassVar[str] = "backbone.head"
    """The prefix of the head's parameter names; without a dot, because a distilled DeiT also has a `head_dist`."""

    joins_clients: ClassVar[bool] = True
    """True if the images of several clients can share a forward pass, as in models with a linear head."""

    @abstractmethod
    def embed(self, pixels: Tensor) -> Tensor:
        """Return the tokens (batch, tokens, width) of normalised pixels (batch, channels, h, w)."""

    def block(self, layer: int, tokens: Tensor) -> Tensor:
        """Return the output of one block, including its residual connections, in the shape of `tokens`."""
        return cast(Tensor, self.backbone.blocks[layer](tokens))

    def classify(self, tokens: Tensor) -> Tensor:
        """Run the layers after the last block, and return logits (batch, classes).

        The layers are the final norm, timm's pooling and the head. `tokens` is the output (batch, tokens, width) of the
        last block.
        """
        return cast(Tensor, self.backbone.forward_head(self.backbone.norm(tokens)))

    def features(self, tokens: Tensor) -> Tensor:
        """Run the layers between the last block and the head, and return the head's input (batch, width).

        The layers are the final norm and timm's pooling. `tokens` is the output (batch, tokens, width) of the last
        block.
        """
        return cast(Tensor, self.backbone.forward_head(self.backbone.norm(tokens), pre_logits=True))

    def draw_head(self, seed: int) -> None:
        """Draw random initial values for the head, which depend only on `seed` and the names of its parameters."""
        draw_head(((name, one) for name, one in self.named_parameters() if name.startswith(self.head_prefix)), seed)
        self.head_is_fresh = True

    def add_heads(self, depths: Iterable[int], seed: int) -> None:
        """Add a trainable classifier at each depth in `depths`.

        The classifier `heads.<d>` classifies the output of the first d blocks.
        """
        shape = self.backbone.num_features, self.backbone.num_classes
        for depth in sorted(depths):
            head = nn.Linear(*shape, device="meta").to_empty(device="cpu")
            draw_head(head.named_parameters(prefix=f"heads.{depth}"), seed)
            self.heads[str(depth)] = head

    @classmethod
    def positions(cls) -> dict[str, tuple[str, ...]]:
        """Return, for each LoRA position, the names of the linear layers that LoRA adapts in a block.

        The LoRA positions are `l0` (the last linear layer of the attention or of a Mixer's token mixing), `l1` (the
        last linear layer of the MLP or of a Mixer's channel mixing) and `both`.
        """
        return {**{name: (place,) for name, place in cls.sublayers.items()}, "both": tuple(cls.sublayers.values())}

    def exits(self, images: Images, walk: Walk, depths: Sequence[int], last: bool) -> list[Tensor]:
        """Return the logits (batch, classes) of classifiers at several depths, shallowest first.

        A single forward pass computes the logits of all classifiers.

        Args:
            images: The images, or a batch with cached tokens.
            walk: The blocks to run, in order.
            depths: The depths of the additional classifiers to use. The classifier at depth d follows the first d
                blocks in `walk`.
            last: Whether to return the logits of the backbone's own head too.
        """
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
        """Return the normalised pixels of uint8 images (batch, 3, h, w), on the model's device.

        The images may be a memory map on the host. If the backbone has only one input channel, the three colours are
        averaged.
        """
        pixels = images.to(self.mean.device, non_blocking=True).to(self.mean.dtype, copy=True).div_(255)
        if len(self.mean) == 1:
            pixels = pixels.mean(1, keepdim=True)
        return standardize_(pixels, self.mean, self.std)

    def forward(self, images: Images, walk: Walk | None = None) -> Tensor:
        """Run the blocks in `walk` on the images, and return the logits (batch, classes).

        If `walk` is None, all blocks are run.
        """
        return self.classify(self.walk(images, range(self.num_layers) if walk is None else walk))

    def walk(self, images: Images, walk: Walk) -> Tensor:
        """Run the steps in `walk` on the images, and return the resulting tokens (batch, tokens, width).

        A step is a block or a module that replaces a block.
        """
        tokens, done = self.begin(images)
        for step in walk[done:]:
            tokens = self.step(step, tokens)
        return tokens

    def begin(self, images: Images) -> tuple[Tensor, int]:
        """Return the tokens with which a forward pass starts, and the number of blocks already applied to them.

        If `images` is a batch with cached tokens, these tokens are returned. Otherwise, the pixels are embedded, and
        the number is 0.
        """
        if isinstance(images, Batch):
            if images.tokens is not None:
                return images.tokens.to(self.mean.device, non_blocking=True), images.done
            images = images.images
        return self.embed(self.normalize(images)), 0

    def frozen_steps(self, walk: Walk, trained: Iterable[str]) -> int:
        """Return how many steps at the start of `walk` are frozen if only the tensors named in `trained` are trained.

        A step is a block or a module that replaces a block. Modules that replace blocks are never frozen.

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
        """Return the tensors of `state` on which the output of the first `steps` blocks in `walk` depends.

        If `steps` is the length of `walk`, the tensors of the layers after the last block are included.
        """
        top = self.top if steps == len(walk) else ()
        behind = tuple(prefix for prefix in self.behind if prefix not in top)
        return {name: state[name] for name in names_within(state, cast("Sequence[int]", walk[:steps]), behind)}

    def height(self, name: str) -> tuple[int, int]:
        """Return the index of a block, and the number of blocks in the model.

        `name` is the name of a tensor in the block.
        """
        return cast(int, layer_of(name)), self.num_layers

    def plain_name(self, name: str) -> str:
        """Convert fedsweep's name for a backbone tensor to the tensor's name in timm or transformers.

        LoRA factors keep the names that PEFT gives them.
        """
        return name.removeprefix("backbone.")

    def cut(self, layers: Sequence[int]) -> dict[str, int]:
        """Return the number of blocks left in timm's or transformers' network if only the blocks `layers` are kept.

        The key is the name of the network's list of blocks, such as `blocks`. If `layers` contains all blocks, the dict
        is empty.
        """
        return {} if len(layers) == self.num_layers else {"blocks": len(layers)}

    def passed(self, images: Images, walk: Walk) -> Tensor:
        """Run the blocks in `walk` on the images, and return the resulting tokens (batch, tokens, width).

        The tokens can be cached, because all blocks in `walk` are frozen.
        """
        return self.walk(images, walk)

    @contextmanager
    def frozen(self, walk: Walk, steps: int) -> Iterator[None]:
        """Keep the first `steps` blocks of `walk` in evaluation mode until the `with` statement ends.

        In evaluation mode, adapters do not apply dropout.
        """
        blocks = [self.backbone.blocks[step] for step in walk[:steps]]
        for block in blocks:
            block.eval()
        try:
            yield
        finally:
            for block in blocks:
                block.train(self.training)

    def step(self, step: Step, tokens: Tensor) -> Tensor:
        """Run one step of a forward pass, and return the resulting tokens (batch, tokens, width).

        A step is a block or a module that replaces a block.
        """
        return self.block(step, tokens) if isinstance(step, int) else step(self, tokens)

    def trainable(self) -> dict[str, nn.Parameter]:
        """Return the trainable parameters, such as adapters and heads, keyed by full name."""
        return {name: parameter for name, parameter in self.named_parameters() if parameter.requires_grad}

    def statistics(self) -> dict[str, Tensor]:
        """Return the running means and variances of the trained batch norms, keyed by full name."""
        return {
            f"{name}.{one}": cast(Tensor, getattr(module, one))
            for name, module in self.named_modules()
            if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d) and module.weight.requires_grad
            for one in STATISTICS
        }

    def movable(self) -> dict[str, Tensor]:
        """Return trainable parameters, batch norm statistics and folded changes (`lora.add_folds`), by full name."""
        folded = {name: one for name, one in self.named_buffers() if is_folded(name)}
        return {**self.trainable(), **self.statistics(), **folded}

    def adapter(self) -> AdapterState:
        """Return copies of the tensors in `movable()`, keyed by full name."""
        return {name: tensor.detach().clone() for name, tensor in self.movable().items()}

    def load_adapter(self, state: AdapterState) -> None:
        """Copy the tensors of `state` into the model.

        Raises:
            KeyError: A name in `state` is not a key of `movable()`.
        """
        copy_into(self.movable(), state)


def completed(held: Sequence[int], stand_ins: Mapping[int, Step]) -> Walk:
    """Return the steps of a client's forward pass, in order: the blocks `held`, and any stand-ins for missing blocks.

    `stand_ins` maps the number of a block to the module that replaces the block. Missing blocks without a stand-in are
    skipped.

    >>> completed((0, 3), {}), completed((0, 3), {layer: f"E{layer}" for layer in range(4)})
    ((0, 3), (0, 'E1', 'E2', 3))
    """
    return tuple(layer if layer in held else stand_ins[layer] for layer in sorted({*held, *stand_ins}))


def copy_into(parameters: Mapping[str, Tensor], state: AdapterState) -> None:
    """Copy the tensors of `state` into the tensors of `parameters` with the same names.

    Raises:
        KeyError: A name in `state` is not in `parameters`.
    """
    if unknown := sorted(set(state) - set(parameters)):
        raise KeyError(f"not trainable tensors of this model: {', '.join(unknown)}")
    if state:
        with torch.no_grad():
            torch._foreach_copy_([parameters[name] for name in state], list(state.values()))


def standardize_(pixels: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Compute (pixels - mean) / std in place, because allocating memory takes longer than the arithmetic."""
    return pixels.sub_(mean).div_(std)
