"""A ViT and CLIP as plain functions of their tensors, in double precision, with LoRA and without dropout.

`w` maps the full name of a tensor to its value. Layers without an adapter have the tensor `<layer>.weight`; adapted
layers have `<layer>.base_layer.weight` and the factors `<layer>.lora_A.default.weight` and `lora_B`.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

Weights = dict[str, Tensor]


def linear(w: Weights, name: str, x: Tensor, scaling: float) -> Tensor:
    """Return W x + b + s B A x; the bias and the adapter are optional."""
    if f"{name}.base_layer.weight" not in w:
        out = x @ w[f"{name}.weight"].T
        return out + w[f"{name}.bias"] if f"{name}.bias" in w else out
    a, b = w[f"{name}.lora_A.default.weight"], w[f"{name}.lora_B.default.weight"]
    return x @ w[f"{name}.base_layer.weight"].T + w[f"{name}.base_layer.bias"] + scaling * ((x @ a.T) @ b.T)


def norm(w: Weights, name: str, x: Tensor, eps: float) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    scaled = centred / ((centred**2).mean(-1, keepdim=True) + eps).sqrt()
    return scaled * w[f"{name}.weight"] + w[f"{name}.bias"]


def attended(q: Tensor, k: Tensor, v: Tensor, heads: int, causal: bool) -> Tensor:
    batch, tokens, width = q.shape
    q, k, v = (one.view(batch, tokens, heads, width // heads).transpose(1, 2) for one in (q, k, v))
    scores = q @ k.transpose(2, 3) / math.sqrt(width // heads)
    if causal:
        scores = scores.masked_fill(torch.ones(tokens, tokens).triu(1).bool(), -math.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, tokens, width)


def patches(images: Tensor, mean: Tensor, std: Tensor, kernel: Tensor) -> Tensor:
    """Return the projected patches (batch, patches, width) of uint8 images."""
    pixels = (images.double() / 255 - mean) / std
    size, step = pixels.shape[-1], kernel.shape[-1]
    cut = [pixels[:, :, i : i + step, j : j + step] for i in range(0, size, step) for j in range(0, size, step)]
    return torch.stack([(one[:, None] * kernel[None]).sum((2, 3, 4)) for one in cut], dim=1)


@dataclass(frozen=True)
class Vit:
    """A ViT of timm (Dosovitskiy et al., 2021)."""

    heads: int
    depth: int
    mean: Tensor
    std: Tensor
    scaling: float = 1.0

    def embed(self, w: Weights, images: Tensor) -> Tensor:
        tokens = patches(images, self.mean, self.std, w["backbone.patch_embed.proj.weight"])
        tokens = tokens + w["backbone.patch_embed.proj.bias"]
        return torch.cat([w["backbone.cls_token"].expand(len(tokens), -1, -1), tokens], 1) + w["backbone.pos_embed"]

    def block(self, w: Weights, layer: int, x: Tensor) -> Tensor:
        name = f"backbone.blocks.{layer}"
        q, k, v = linear(w, f"{name}.attn.qkv", norm(w, f"{name}.norm1", x, 1e-6), 0).chunk(3, -1)
        x = x + linear(w, f"{name}.attn.proj", attended(q, k, v, self.heads, False), self.scaling)
        hidden = linear(w, f"{name}.mlp.fc1", norm(w, f"{name}.norm2", x, 1e-6), self.scaling)
        gelu = hidden * (1 + torch.erf(hidden / math.sqrt(2))) / 2
        return x + linear(w, f"{name}.mlp.fc2", gelu, self.scaling)

    def features(self, w: Weights, tokens: Tensor) -> Tensor:
        return norm(w, "backbone.norm", tokens, 1e-6)[:, 0]

    def classify(self, w: Weights, tokens: Tensor, head: str = "backbone.head") -> Tensor:
        return linear(w, head, self.features(w, tokens), 0)

    def logits(self, w: Weights, images: Tensor, layers) -> Tensor:
        tokens = self.embed(w, images)
        for layer in layers:
            tokens = self.block(w, layer, tokens)
        return self.classify(w, tokens)


@dataclass(frozen=True)
class Clip:
    """CLIP (Radford et al., 2021) with equally deep encoders; names begin with `root`."""

    heads: int
    depth: int
    mean: Tensor
    std: Tensor
    prompts: Tensor
    ends: Tensor
    scaling: float = 1.0
    root: str = ""

    def block(self, w: Weights, layer: int, tower: str, x: Tensor) -> Tensor:
        name = f"{self.root}backbone.blocks.{layer}.{tower}"
        normed = norm(w, f"{name}.layer_norm1", x, 1e-5)
        q, k, v = (linear(w, f"{name}.self_attn.{one}_proj", normed, self.scaling) for one in "qkv")
        mixed = attended(q, k, v, self.heads, tower == "text")
        x = x + linear(w, f"{name}.self_attn.out_proj", mixed, self.scaling)
        hidden = linear(w, f"{name}.mlp.fc1", norm(w, f"{name}.layer_norm2", x, 1e-5), self.scaling)
        return x + linear(w, f"{name}.mlp.fc2", hidden * torch.sigmoid(1.702 * hidden), self.scaling)

    def projected(self, w: Weights, images: Tensor) -> Tensor:
        """Return the output (batch, projection) of the image encoder before its normalisation."""
        stem = f"{self.root}backbone.stem"
        tokens = patches(images, self.mean, self.std, w[f"{stem}.embeddings.patch_embedding.weight"])
        first = w[f"{stem}.embeddings.class_embedding"].expand(len(tokens), 1, -1)
        tokens = torch.cat([first, tokens], 1) + w[f"{stem}.embeddings.position_embedding.weight"]
        tokens = norm(w, f"{stem}.norm", tokens, 1e-5)
        for layer in range(self.depth):
            tokens = self.block(w, layer, "vision", tokens)
        top = f"{self.root}backbone.top"
        return norm(w, f"{top}.vision_norm", tokens[:, 0], 1e-5) @ w[f"{top}.vision_projection.weight"].T

    def texts(self, w: Weights) -> Tensor:
        """Return the unit features (classes, projection) of the prompts, with learned context if `w` has it."""
        words = f"{self.root}backbone.words"
        tokens = w[f"{words}.token_embedding.weight"][self.prompts]
        if "prompt.context" in w:
            context = w["prompt.context"].expand(len(tokens), -1, -1)
            tokens = torch.cat([tokens[:, :1], context, tokens[:, 1:]], 1)
        tokens = tokens + w[f"{words}.position_embedding.weight"][: tokens.shape[1]]
        for layer in range(self.depth):
            tokens = self.block(w, layer, "text", tokens)
        top, ends = f"{self.root}backbone.top", self.ends
        last = torch.stack([row[end] for row, end in zip(tokens, ends.tolist(), strict=True)])
        return unit(norm(w, f"{top}.text_norm", last, 1e-5) @ w[f"{top}.text_projection.weight"].T)

    def logits(self, w: Weights, images: Tensor, layers=None) -> Tensor:
        seen = self.projected(w, images)
        if "image_adapter.0.weight" in w:
            seen = adapted(w, "image_adapter", seen)
        return unit(seen) @ self.texts(w).T * w[f"{self.root}backbone.logit_scale"].exp()


def unit(x: Tensor) -> Tensor:
    return x / (x**2).sum(-1, keepdim=True).sqrt()


def adapted(w: Weights, name: str, x: Tensor) -> Tensor:
    """Return softmax(MLP1(tanh(MLP2(x)))) * x (FedAG, Eq. 4)."""
    return linear(w, f"{name}.2", torch.tanh(linear(w, f"{name}.0", x, 0)), 0).softmax(-1) * x


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return (logits.logsumexp(1) - logits.gather(1, labels[:, None])[:, 0]).mean()
