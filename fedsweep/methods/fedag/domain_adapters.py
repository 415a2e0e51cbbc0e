"""The model on FedAG's server: a frozen CLIP model, an adapter for each domain, and attention over the adapters."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Literal, cast

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from fedsweep.common.config import Config
from fedsweep.common.errors import UserError
from fedsweep.models.activation_cache import FrozenFunction, walk_key
from fedsweep.models.clip.backbone import ClipBackbone, DigitsClip
from fedsweep.models.clip.model import FeatureAdapter, LayeredClip
from fedsweep.models.initial_values import draw_linears
from fedsweep.models.weight_cache import built

ClipConfig = Annotated[DigitsClip | ClipBackbone, Field(discriminator="name")]


class AdaptersConfig(Config):
    """The settings of the trained modules on the server: the domains' adapters and the attention over the adapters."""

    hidden: int | None = Field(
        None, gt=0, description="width of an adapter's hidden layer; `null`: width of the features"
    )
    attention: int = Field(
        64, gt=0, description="width of the hidden layer in the MLP that weighs the adapters by their logits (Eq. 8)"
    )
    logits: Literal["cosine", "product"] = Field(
        "cosine",
        description="logits of an adapter. `cosine`: cosine similarities times CLIP's learned scale (as in FedCLIP); "
        "`product`: inner products (Eq. 5 as printed)",
    )


class DomainAdapters(nn.Module):
    """CLIP with an adapter A_n for each domain n and with attention over the adapters (FedAG, Eqs. 3 to 5 and 8).

    The logits of adapter n are phi_n = <A_n(I) * I, T>. Here, I denotes the features that CLIP computes for the images,
    and T denotes the features that CLIP computes for the prompts of the classes. The attention computes a weight beta_n
    for each adapter and combines the logits: eta = sum_n beta_n phi_n.

    CLIP is frozen. Callers pass the image features I, and this class stores the text features T.
    """

    text: Tensor
    scale: Tensor

    def __init__(
        self, clip: LayeredClip, config: AdaptersConfig, domains: Collection[str], seed: int, identity: str
    ) -> None:
        super().__init__()
        self.clip, self.logits, self.identity = clip.requires_grad_(False), config.logits, identity
        device, width = clip.mean.device, clip.backbone.num_features
        self.domains = tuple(sorted(domains))
        self.adapters = nn.ModuleList(
            FeatureAdapter(width, config.hidden, device, seed, "domain adapter", name) for name in self.domains
        )
        with torch.device("meta"):
            first, last = nn.Linear(len(clip.class_names), config.attention), nn.Linear(config.attention, 1)
            mlp = nn.Sequential(first, nn.ReLU(), last)
        self.attention = mlp.to_empty(device=device)
        draw_linears(self.attention, seed, "adapter attention")
        with torch.no_grad():
            self.register_buffer("text", clip.text_features(range(clip.num_layers)).clone(), persistent=False)
            self.register_buffer("scale", clip.backbone.logit_scale.exp().clone(), persistent=False)

    def seen(self) -> FrozenFunction:
        """Return CLIP's image encoder as a function from uint8 images (n, 3, h, w) to features (n, width) (Eq. 3)."""
        clip = self.clip
        walk = tuple(range(clip.num_layers))
        key = walk_key(
            self.identity, walk, True, {}, clip.mean.device
        )  # the key of runs whose backbone is this CLIP model
        return FrozenFunction(key, lambda images: clip.passed(images, walk))

    def logits_of(self, domain: int, features: Tensor) -> Tensor:
        """Return the logits (n, classes) of the adapter with index `domain` for image features (n, width) (Eq. 5)."""
        adapted = self.adapters[domain](features)
        if self.logits == "cosine":
            adapted = F.normalize(adapted, dim=-1) * self.scale
        return cast(Tensor, adapted @ self.text.T)

    def all_logits(self, features: Tensor) -> Tensor:
        """Return the logits (domains, n, classes) of all adapters for image features (n, width)."""
        return torch.stack([self.logits_of(place, features) for place in range(len(self.domains))])

    def attended(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Combine the logits of all adapters with attention weights that are computed from the logits (Eq. 8).

        Args:
            logits: The logits phi of all adapters, of shape (domains, n, classes).

        Returns:
            The combined logits eta (n, classes) and the attention weights beta (domains, n).
        """
        beta = torch.softmax(self.attention(logits).squeeze(-1), dim=0)
        return (beta.unsqueeze(-1) * logits).sum(0), beta

    def train(self, mode: bool = True) -> DomainAdapters:
        """Set training or evaluation mode for all modules except CLIP, which stays in evaluation mode."""
        super().train(mode)
        self.clip.eval()
        return self


def build_domain_adapters(
    clip: ClipConfig, config: AdaptersConfig, domains: Collection[str], class_names: Sequence[str] | int, seed: int
) -> DomainAdapters:
    """Return a pre-trained CLIP model with untrained adapters and untrained attention over the adapters.

    Args:
        clip: The configuration of CLIP.
        config: The sizes of the adapters and of the attention.
        domains: The names of the domains, each of which gets an adapter.
        class_names: The names of the classes. If the number of classes is given instead, everything is built on the
            meta device, without weights.
        seed: The seed of the initial values of the adapters and the attention.

    Raises:
        UserError: CLIP's checkpoint is missing, is damaged or has a different architecture, or a prompt is too long.
    """
    if isinstance(class_names, int):
        return DomainAdapters(clip.outlined(class_names), config, domains, seed, "outlined")
    content = clip.fingerprint()
    with torch.random.fork_rng(devices=[]):  # constructors draw random values that are then overwritten
        model = built("beside", clip, content, len(class_names), 0, tuple(class_names)).eval()
    return DomainAdapters(model, config, domains, seed, clip.identity(content))


@contextmanager
def named_here() -> Iterator[None]:
    """Replace `backbone` with `method.clip` in the messages of UserErrors that the `with` block raises.

    Without the replacement, an error in the server's CLIP model would name the option `backbone`, which configures the
    clients' model.
    """
    try:
        yield
    except UserError as error:
        raise UserError(str(error).replace("`backbone.", "`method.clip.")) from None
