"""A CLIP model that runs block by block, with one encoder for images and one for the prompts of the classes."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedsweep.common.errors import UserError
from fedsweep.common.randomness import derived_seed
from fedsweep.common.yaml_values import readable
from fedsweep.models.clip.weights import in_clip_model
from fedsweep.models.initial_values import draw_linears
from fedsweep.models.layered import Images, LayeredModel, Walk
from fedsweep.models.names import layer_of
from fedsweep.types import AdapterState

IMAGES, TEXT = "vision", "text"
Tokenize = Callable[[Sequence[str]], tuple[Tensor, Tensor]]
"""A tokenizer: it maps n texts to tokens (n, longest) and to the position of each text's last token (n,)."""


class Towers(nn.Module):
    """The network of transformers' CLIPModel, with the blocks of its two encoders arranged in pairs.

    Block l is a pair of one image block and one text block. The last blocks of both encoders form the last pair. If one
    encoder is deeper (CLIP L/14 has 24 image blocks and 12 text blocks), its first blocks have no partner.
    """

    def __init__(self, clip: Any) -> None:
        super().__init__()
        vision, text = clip.vision_model, clip.text_model
        self.stem = nn.ModuleDict({"embeddings": vision.embeddings, "norm": vision.pre_layrnorm})
        self.words = text.embeddings
        encoders = {IMAGES: list(vision.encoder.layers), TEXT: list(text.encoder.layers)}
        depth = max(map(len, encoders.values()))
        pairs: list[dict[str, nn.Module]] = [{} for _ in range(depth)]
        for name, layers in encoders.items():
            for pair, layer in zip(pairs[depth - len(layers) :], layers, strict=True):
                pair[name] = layer
        self.blocks = nn.ModuleList(map(nn.ModuleDict, pairs))
        self.top = nn.ModuleDict(
            {
                "vision_norm": vision.post_layernorm,
                "vision_projection": clip.visual_projection,
                "text_norm": text.final_layer_norm,
                "text_projection": clip.text_projection,
            }
        )
        self.logit_scale = clip.logit_scale
        self.num_features = clip.config.projection_dim


class FeatureAdapter(nn.Sequential):
    """FedAG's attention adapter, which multiplies features elementwise by attention weights (FedAG, Eq. 4).

    For features I, the output is softmax(MLP1(tanh(MLP2(I)))) * I. Inputs and outputs have the shape (n, width). FedAG
    takes the adapter from FedCLIP (Lu et al., 2023). `hidden` is the number of hidden units; None uses `width`. The
    initial values depend on `seed` and the strings in `key`.
    """

    def __init__(self, width: int, hidden: int | None, device: torch.device, seed: int, *key: str) -> None:
        hidden = hidden or width
        with torch.device("meta"):  # the constructors' random values are overwritten below
            super().__init__(nn.Linear(width, hidden), nn.Tanh(), nn.Linear(hidden, width), nn.Softmax(dim=-1))
        self.to_empty(device=device)
        draw_linears(self, seed, *key)

    def forward(self, features: Tensor) -> Tensor:
        """Return the features (n, width), multiplied elementwise by their attention weights."""
        weights = features
        for layer in self:
            weights = layer(weights)
        return weights * features


class LayeredClip(LayeredModel):
    """A CLIP model that runs block by block.

    A logit is the cosine similarity between the features of an image and the features of a prompt, multiplied by
    exp(s), where s is CLIP's logit scale.

    Prompts are padded only to the length of the longest prompt. The padding does not change the output, because the
    text encoder is causal. If no gradients are needed, the features of the prompts are computed once and reused until
    `load_adapter` or `train` is called.
    """

    backbone: Towers
    sublayers: ClassVar = {}
    head_prefix = "no head"
    joins_clients: ClassVar = False
    top: ClassVar = ("backbone.top.", "backbone.logit_scale")
    behind: ClassVar = (*top, "backbone.words.", "prompt.", "gate.", "image_adapter.")

    def __init__(
        self,
        backbone: Towers,
        mean: Sequence[float],
        std: Sequence[float],
        tokenize: Tokenize,
        template: str,
        class_names: Sequence[str],
    ) -> None:
        super().__init__(backbone, mean, std)
        self.tokenize, self.class_names = tokenize, tuple(map(readable, class_names))
        self.prompt = nn.ParameterDict()
        self.image_adapter: FeatureAdapter | None = None
        self._known: dict[tuple[int, ...], Tensor] = {}
        self._read([template.format(name) for name in self.class_names])
        self._begun: tuple[Tensor, int] | None = None

    @classmethod
    def positions(cls) -> dict[str, tuple[str, ...]]:
        """Return, for each LoRA position, the names of the linear layers that LoRA adapts in a pair of blocks.

        A pair consists of a block of the image encoder and a block of the text encoder.
        """
        attention, mlp = [f"self_attn.{name}_proj" for name in ("q", "k", "v", "out")], ["mlp.fc1", "mlp.fc2"]
        l0, l1 = attention[-1:], mlp[-1:]
        inner = {"l0": l0, "l1": l1, "attention": attention, "mlp": mlp, "both": l0 + l1, "all": attention + mlp}
        return {name: tuple(f"{one}.{place}" for one in (IMAGES, TEXT) for place in to) for name, to in inner.items()}

    def height(self, name: str) -> tuple[int, int]:
        """Return the index of a block within its encoder, and the number of blocks in the encoder.

        `name` is the name of a tensor in the block.
        """
        layer, tower = cast(int, layer_of(name)), name.split(".")[3]
        depth = sum(tower in self._pair(one) for one in range(self.num_layers))
        return layer - self.num_layers + depth, depth

    def plain_name(self, name: str) -> str:
        """Convert fedsweep's name for a tensor to the tensor's name in transformers' CLIPModel.

        In fedsweep's names, a number stands for a pair of blocks, one in each encoder. CLIPModel numbers the blocks of
        each encoder separately.
        """
        return in_clip_model(name, None if layer_of(name) is None else self.height(name)[0])

    def cut(self, layers: Sequence[int]) -> dict[str, int]:
        """Return the number of blocks left in each encoder of CLIPModel if only the blocks `layers` are kept.

        The key of an encoder is the name of its list of blocks, such as `text_model.encoder.layers`. If `layers`
        contains all blocks, the dict is empty.
        """
        if len(layers) == self.num_layers:
            return {}
        pairs = [self._pair(layer) for layer in layers]
        return {f"{tower}_model.encoder.layers": sum(tower in pair for pair in pairs) for tower in (IMAGES, TEXT)}

    def embed(self, pixels: Tensor) -> Tensor:
        """Return the normalised image tokens (batch, tokens, width) before the first block.

        The class token comes before the tokens of the patches. Position embeddings are already added to all tokens.
        """
        return cast(Tensor, self.backbone.stem["norm"](self.backbone.stem["embeddings"](pixels)))

    def block(self, layer: int, tokens: Tensor) -> Tensor:
        """Return the output of one block of the image encoder, in the shape of `tokens`."""
        return self._run(IMAGES, layer, tokens)

    def features(self, tokens: Tensor) -> Tensor:
        """Return the images' features as unit vectors (batch, projection), in the same space as the prompts' features.

        Args:
            tokens: The image tokens after the last block (batch, tokens, width).
        """
        return self.placed(self.projected(tokens))

    def projected(self, tokens: Tensor) -> Tensor:
        """Run the image encoder's layers after the last block, and return their output (batch, projection).

        `tokens` is the output (batch, tokens, width) of the last block.
        """
        top = self.backbone.top
        return cast(Tensor, top["vision_projection"](top["vision_norm"](tokens[:, 0])))

    def placed(self, projected: Tensor) -> Tensor:
        """Return the images' features as unit vectors (batch, projection).

        `projected` is the image encoder's output (batch, projection). If the model has an image adapter, the adapter is
        applied before the normalisation.
        """
        return F.normalize(projected if self.image_adapter is None else self.image_adapter(projected), dim=-1)

    def forward(self, images: Images, walk: Walk | None = None) -> Tensor:
        """Run the blocks in `walk` in both encoders, and return the images' logits (batch, classes).

        If `walk` is None, all blocks are run.
        """
        walk = range(self.num_layers) if walk is None else walk
        return self._logits(self.placed(self.passed(images, walk)), walk)

    def classify(self, tokens: Tensor) -> Tensor:
        """Return logits (batch, classes), given the image tokens (batch, tokens, width) after the last block."""
        return self._logits(self.features(tokens), range(self.num_layers))

    def _logits(self, features: Tensor, walk: Walk) -> Tensor:
        return cast(Tensor, features @ self.text_features(walk).T * self.backbone.logit_scale.exp())

    def passed(self, images: Images, walk: Walk) -> Tensor:
        """Run the blocks in `walk` on the images, and return the image encoder's output (batch, projection).

        If `images` is a `Batch` that already contains the image encoder's output, the cached output is returned.
        """
        tokens = self.walk(images, walk)
        return tokens if tokens.ndim == 2 else self.projected(tokens)

    def text_features(self, walk: Walk) -> Tensor:
        """Return the prompts' features as unit vectors (classes, projection).

        An item of `walk` is the number of a block, which both encoders have, or a function that replaces a block of the
        image encoder. The text encoder skips these functions.
        """
        layers = tuple(step for step in walk if isinstance(step, int))
        if layers in self._known and not torch.is_grad_enabled():
            return self._known[layers]
        tokens, done = self._begun or (self._words(), 0)
        for layer in layers[done:]:
            tokens = self._run(TEXT, layer, tokens)
        top, rows = self.backbone.top, torch.arange(len(tokens), device=tokens.device)
        found = F.normalize(top["text_projection"](top["text_norm"](tokens[rows, self.ends])), dim=-1)
        if not torch.is_grad_enabled():
            self._known[layers] = found
        return found

    def _words(self) -> Tensor:
        """Return the embeddings (classes, tokens, width) of the prompts.

        If the model has learned context vectors, they are inserted after the start token.
        """
        if "context" not in self.prompt:
            return cast(Tensor, self.backbone.words(input_ids=self.prompts))
        words, context = self.backbone.words.token_embedding(self.prompts), self.prompt["context"]
        embedded = torch.cat([words[:, :1], context.expand(len(words), -1, -1), words[:, 1:]], dim=1)
        return cast(Tensor, self.backbone.words(inputs_embeds=embedded))

    def _pair(self, layer: int) -> nn.ModuleDict:
        return cast(nn.ModuleDict, self.backbone.blocks[layer])

    def _run(self, tower: str, layer: int, tokens: Tensor) -> Tensor:
        pair = self._pair(layer)
        return cast(Tensor, pair[tower](tokens, None, is_causal=tower == TEXT)) if tower in pair else tokens

    def add_image_adapter(self, hidden: int | None, seed: int) -> None:
        """Add `image_adapter`, FedCLIP's attention adapter for image features.

        `hidden` is the number of hidden units in the adapter; None uses the number of features.
        """
        width = self.backbone.num_features
        self.image_adapter = FeatureAdapter(width, hidden, self.mean.device, seed, "image adapter")

    def add_context(self, count: int, seed: int) -> None:
        """Replace each prompt with `count` learned context vectors, followed by the class name (PromptFL).

        All classes share the vectors, which are stored in the parameter `prompt.context` of shape (count, width of the
        text encoder).

        Raises:
            UserError: A prompt is longer than the text encoder allows.
        """
        device = self.prompts.device
        self._read([f"{name}." for name in self.class_names], count)
        fresh = torch.empty(count, self.backbone.words.token_embedding.embedding_dim)
        generator = torch.Generator().manual_seed(derived_seed(seed, "context"))
        nn.init.normal_(fresh, std=0.02, generator=generator)
        self.prompt["context"] = nn.Parameter(fresh)
        self.to(device)

    def _read(self, texts: Sequence[str], context: int = 0) -> None:
        prompts, ends = self.tokenize(texts)
        most = self.backbone.words.position_embedding.num_embeddings
        if (longest := prompts.shape[1] + context) > most:
            text = texts[int(ends.argmax())]
            raise UserError(f"a prompt must have at most {most} tokens, but `{text}` has {longest}.")
        self.register_buffer("prompts", prompts, persistent=False)
        self.register_buffer("ends", ends + context, persistent=False)
        self._known.clear()

    prompts: Tensor
    ends: Tensor

    def load_adapter(self, state: AdapterState) -> None:
        """Copy the tensors of `state` into the model, and discard the cached features of the prompts.

        Raises:
            KeyError: A name in `state` is not a key of `movable()`.
        """
        self._known.clear()
        super().load_adapter(state)

    def train(self, mode: bool = True) -> Self:
        """Switch to training mode, or to evaluation mode if `mode` is false.

        The cached features of the prompts are discarded.
        """
        self._known.clear()
        super().train(mode)
        return self

    @contextmanager
    def frozen(self, walk: Walk, steps: int) -> Iterator[None]:
        """Keep the first `steps` blocks of `walk` in evaluation mode until the `with` statement ends.

        Unless context vectors or word embeddings are trained, the text encoder runs these blocks only once, and their
        output is reused until the `with` statement ends.
        """
        with super().frozen(walk, steps):
            frozen = not any(one.requires_grad for one in self.backbone.words.parameters())
            if steps and frozen and "context" not in self.prompt:
                with torch.no_grad():
                    tokens = self._words()
                    for step in walk[:steps]:
                        tokens = self._run(TEXT, cast(int, step), tokens)
                self._begun = tokens, steps
            try:
                yield
            finally:
                self._begun = None
