"""CLIP as a layered model: images pass through the blocks of one encoder, the classes' prompts through the other's."""

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
from fedsweep.models.layered import Images, LayeredModel, Walk, draw_linears
from fedsweep.models.names import layer_of
from fedsweep.types import AdapterState

IMAGES, TEXT = "vision", "text"
Tokenize = Callable[[Sequence[str]], tuple[Tensor, Tensor]]
"""Texts to their tokens (n, longest), and the place of each one's last token (n,)."""


class Towers(nn.Module):
    """transformers' CLIPModel with its two encoders side by side: block l is the pair of both, aligned at the top.

    If one encoder is deeper (24 and 12 blocks in L/14), its lowest blocks have no partner.
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
    """A(I) * I with A(I) = softmax(MLP1(tanh(MLP2(I)))): (n, width) to the same (FedAG, Eq. 4).

    Source: Lu et al., FedCLIP (2023), from which FedAG takes it. `hidden` is the width between the two MLPs, by default
    that of the features. Each tensor is drawn from a stream of the key.
    """

    def __init__(self, width: int, hidden: int | None, device: torch.device, seed: int, *key: str) -> None:
        hidden = hidden or width
        with torch.device("meta"):  # constructors draw values that are overwritten at once
            super().__init__(nn.Linear(width, hidden), nn.Tanh(), nn.Linear(hidden, width), nn.Softmax(dim=-1))
        self.to_empty(device=device)
        draw_linears(self, seed, *key)

    def forward(self, features: Tensor) -> Tensor:
        """Return the weighted features."""
        weights = features
        for layer in self:
            weights = layer(weights)
        return weights * features


class LayeredClip(LayeredModel):
    """Logits are exp(s) <V, T>: cosines of an image's features with those of the classes' prompts.

    Prompts are cut after the longest one's last token, which in a causal encoder changes nothing. Their features are
    computed once for each state of the text encoder: in evaluation they are kept until other tensors are loaded.
    """

    backbone: Towers
    sublayers: ClassVar = {}
    head_prefix = "no head"
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
        """Return the places of adapters in both encoders' blocks."""
        attention, mlp = [f"self_attn.{name}_proj" for name in ("q", "k", "v", "out")], ["mlp.fc1", "mlp.fc2"]
        l0, l1 = attention[-1:], mlp[-1:]
        inner = {"l0": l0, "l1": l1, "attention": attention, "mlp": mlp, "both": l0 + l1, "all": attention + mlp}
        return {name: tuple(f"{one}.{place}" for one in (IMAGES, TEXT) for place in to) for name, to in inner.items()}

    def height(self, name: str) -> tuple[int, int]:
        """Return both numbers for the tensor's own encoder, which may lack the lower blocks."""
        layer, tower = cast(int, layer_of(name)), name.split(".")[3]
        depth = sum(tower in self._pair(one) for one in range(self.num_layers))
        return layer - self.num_layers + depth, depth

    def plain_name(self, name: str) -> str:
        """Return the name in transformers' CLIPModel, in which each encoder counts its own blocks."""
        return in_clip_model(name, None if layer_of(name) is None else self.height(name)[0])

    def cut(self, layers: Sequence[int]) -> dict[str, int]:
        """Return the number of blocks of each encoder within `layers`."""
        if len(layers) == self.num_layers:
            return {}
        pairs = [self._pair(layer) for layer in layers]
        return {f"{tower}_model.encoder.layers": sum(tower in pair for pair in pairs) for tower in (IMAGES, TEXT)}

    def embed(self, pixels: Tensor) -> Tensor:
        """Return patches, class token and positions, normalised."""
        return cast(Tensor, self.backbone.stem["norm"](self.backbone.stem["embeddings"](pixels)))

    def block(self, layer: int, tokens: Tensor) -> Tensor:
        """Run the image encoder's part of a block."""
        return self._run(IMAGES, layer, tokens)

    def features(self, tokens: Tensor) -> Tensor:
        """Return an image's features among the prompts': (batch, tokens, width) to unit vectors (batch, projection)."""
        return self.placed(self.projected(tokens))

    def projected(self, tokens: Tensor) -> Tensor:
        """Return the image encoder's output: (batch, tokens, width) to (batch, projection)."""
        top = self.backbone.top
        return cast(Tensor, top["vision_projection"](top["vision_norm"](tokens[:, 0])))

    def placed(self, projected: Tensor) -> Tensor:
        """Return unit vectors (batch, projection) of features, which first pass through the image adapter, if any."""
        return F.normalize(projected if self.image_adapter is None else self.image_adapter(projected), dim=-1)

    def forward(self, images: Images, walk: Walk | None = None) -> Tensor:
        """Return logits (batch, classes): both encoders walk the same steps."""
        walk = range(self.num_layers) if walk is None else walk
        return self._logits(self.placed(self.passed(images, walk)), walk)

    def classify(self, tokens: Tensor) -> Tensor:
        """Return logits (batch, classes) of an image's tokens after all blocks."""
        return self._logits(self.features(tokens), range(self.num_layers))

    def _logits(self, features: Tensor, walk: Walk) -> Tensor:
        return cast(Tensor, features @ self.text_features(walk).T * self.backbone.logit_scale.exp())

    def passed(self, images: Images, walk: Walk) -> Tensor:
        """Return the image encoder's output (batch, projection), computed unless the batch holds it already."""
        tokens = self.walk(images, walk)
        return tokens if tokens.ndim == 2 else self.projected(tokens)

    def text_features(self, walk: Walk) -> Tensor:
        """Return unit vectors (classes, projection) of the prompts after the walk's blocks, without its other steps."""
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
        """Tokens of the prompts, with the learned context vectors, if any, after the first one."""
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
        """Add FedCLIP's attention over the image's features, `image_adapter` (projection to hidden to projection)."""
        width = self.backbone.num_features
        self.image_adapter = FeatureAdapter(width, hidden, self.mean.device, seed, "image adapter")

    def add_context(self, count: int, seed: int) -> None:
        """Add PromptFL's vectors, `prompt.context` (count, width of the text encoder), before the classes' bare names.

        Raise UserError if the vectors and the longest name together exceed the text encoder's length.
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
        """Copy tensors into the model; the prompts' features are computed anew."""
        self._known.clear()
        super().load_adapter(state)

    def train(self, mode: bool = True) -> Self:
        """Switch between training and evaluation; the prompts' features are computed anew."""
        self._known.clear()
        super().train(mode)
        return self

    @contextmanager
    def frozen(self, walk: Walk, steps: int) -> Iterator[None]:
        """Hold the frozen blocks in evaluation; compute the tokens of prompts after them once, if words are frozen."""
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
