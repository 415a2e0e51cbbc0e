"""Sources of synthetic images: their base class, a folder of any generator, and images of a diffusers checkpoint."""

import hashlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal, Self

import torch
from pydantic import Field, field_validator, model_validator
from torch import Tensor

from fedsweep.common.config import Config
from fedsweep.common.errors import UserError, near
from fedsweep.common.randomness import derived_seed, stream
from fedsweep.common.yaml_values import readable
from fedsweep.data.partition import pool
from fedsweep.data.prepared.card import StoreCard, is_store, read_card, store_folder
from fedsweep.data.prepared.dataset import Data, PreparedData
from fedsweep.types import Domain, FederatedData, ImageSet


class Synthetic(Config, ABC):
    """A source of synthetic images."""

    needs_proxy: ClassVar[bool] = False  # True if the source needs images that the server holds
    stands_in: ClassVar[bool] = False  # True if the source replaces a generator, which every result that used it notes

    name: str

    @abstractmethod
    def make(self, data: FederatedData, proxy: Mapping[str, ImageSet], seed: int) -> dict[str, ImageSet]:
        """Return images by domain, or raise UserError if there are too few; `proxy` has the server's images."""

    def check(self, data: Data) -> None:
        """Raise ValueError if the configuration does not fit the data's domains; no image is read."""

    def fingerprint(self, data: FederatedData) -> str:
        """Return the digest of the files that are read, or an empty string; raise UserError if they are missing."""
        return ""


class NoSynthetic(Synthetic):
    """No synthetic images."""

    name: Literal["none"] = "none"

    def make(self, data: FederatedData, proxy: Mapping[str, ImageSet], seed: int) -> dict[str, ImageSet]:
        """Return no images."""
        return {}


class Proportioned(Synthetic, ABC):
    """A source of a number of images in proportion to a domain's training images (FedAG, Section 4.1)."""

    share: float = Field(0.1, gt=0, le=10, description="images of each domain, as a share of its training images")

    def labels(self, domain: Domain, classes: int) -> Tensor:
        """Return the images' classes, int64 (n,): balanced, because the server does not know the clients' labels."""
        return torch.arange(max(1, round(self.share * len(domain.train)))) % classes

    def wanted(self, domain: Domain, class_names: Sequence[str]) -> list[int]:
        """Return the number of images of each class."""
        return self.labels(domain, len(class_names)).bincount(minlength=len(class_names)).tolist()


class Folder(Proportioned):
    """A folder `<domain>/<class>/<image>` of any generator, once `fedsweep data prepare` has decoded it."""

    name: Literal["folder"] = "folder"
    set: str = Field(min_length=1, description="name that the images were prepared under, e.g. `office_home_synthetic`")

    def check(self, data: Data) -> None:
        """Raise ValueError if the set is the clients' data set, which also contains the test images."""
        if isinstance(data, PreparedData) and data.set == self.set:
            raise ValueError(
                f"`synthetic.set` must be images of a generator, but {self.set} is the `data.set`, with its test images"
            )

    def make(self, data: FederatedData, proxy: Mapping[str, ImageSet], seed: int) -> dict[str, ImageSet]:
        """Draw `share` of each domain's number of images from the prepared set, evenly over its classes."""
        return _draw(self.set, self, data, seed, f"`synthetic.set` {self.set}")

    def fingerprint(self, data: FederatedData) -> str:
        """Return the digest of the set, at the size of the data."""
        return _load(self.set, data, f"`synthetic.set` {self.set}").digest


def size_of(data: FederatedData) -> int:
    """Return the height and width of the images, in pixels."""
    return int(data.domains[0].test.take(torch.arange(1))[0].shape[-1])


def _draw(
    name: str, config: Proportioned, data: FederatedData, seed: int, what: str, hint: str = ""
) -> dict[str, ImageSet]:
    """Draw images by domain from the prepared set `name`; error messages begin with `what` and end with `hint`."""
    found = _load(name, data, what)
    labels = torch.tensor([data.class_names.index(one) for one in found.class_names])
    made = {}
    for domain, source in zip(data.domains, found.domains, strict=True):
        whole = pool([source.train, source.test])
        whole = ImageSet(whole.images, labels[whole.labels], whole.rows)
        rows = []
        for label, count in enumerate(config.wanted(domain, data.class_names)):
            own = (whole.labels == label).nonzero().flatten()
            if len(own) < count:
                raise UserError(
                    f"{what} must have {count} images of `{data.class_names[label]}` in {domain.name} "
                    f"for a `synthetic.share` of {config.share:g}, but it has {len(own)}{hint}."
                )
            order = stream(seed, "synthetic", domain.name, label).permutation(len(own))[:count]
            rows.append(own[torch.from_numpy(order)])
        made[domain.name] = whole.select(torch.cat(rows).sort().values)
    return made


def _load(name: str, data: FederatedData, what: str) -> FederatedData:
    """Load the prepared set `name` with the size and domains of the data."""
    domains = tuple(domain.name for domain in data.domains)
    try:
        found = PreparedData(set=name, size=size_of(data), domains=domains).load()
    except UserError as error:
        sentence = str(error).replace("`data.domains`", "`synthetic.set`").replace("`data.", "`synthetic.")
        raise UserError(sentence) from None
    for stray in found.class_names:
        if stray not in data.class_names:
            raise UserError(
                f"{what} must have the classes of {data.name}, but `{stray}` is one of its own"
                f"{near(stray, data.class_names) or '.'}"
            )
    return found


CLASS, STYLE = "{class}", "{style}"
_PLACE = re.compile(r"\{[^{}]*\}|[{}]")


class Diffusers(Proportioned):
    """A checkpoint that the library diffusers reads, asked for each class in the style of each domain (FedAG, 4.1).

    A style without words is learned: an embedding by textual inversion, whose token stands in the prompt.
    """

    name: Literal["diffusers"] = "diffusers"
    model: str = Field(min_length=1, description="text-to-image checkpoint: its name on the hub, or a folder")
    template: str = Field(
        "a photograph of a {class} in {style} style", description="the prompt; {class} stands in it once"
    )
    styles: dict[str, str] = Field(
        {}, description="by domain: words that stand for {style}, or the token of its embedding"
    )
    embeddings: dict[str, str] = Field(
        {}, description="by domain: file of a textual inversion, of the token in `styles`"
    )
    num_inference_steps: int = Field(50, ge=1, description="denoising steps of an image")
    guidance_scale: float = Field(7.5, ge=0, description="weight of the prompt (classifier-free guidance)")
    image_size: int | None = Field(
        None, ge=8, multiple_of=8, description="height and width of the generated images, pixels; null: the model's own"
    )
    seed: int = Field(0, ge=0, description="of the generation, not of the run: runs of all seeds share the images")

    @field_validator("template")
    @classmethod
    def _has_places(cls, template: str) -> str:
        places = _PLACE.findall(template)
        if places.count(CLASS) != 1 or places.count(STYLE) > 1 or set(places) - {CLASS, STYLE}:
            raise ValueError(
                "`synthetic.template` must contain {class} once, {style} at most once and no other braces, "
                f"but it is `{template}`"
            )
        return template

    @model_validator(mode="after")
    def _styles_fit(self) -> Self:
        if self.styles and STYLE not in self.template:
            raise ValueError(
                f"`synthetic.styles` needs {{style}} in `synthetic.template`, but that is `{self.template}`"
            )
        files: dict[str, str] = {}
        for domain, file in self.embeddings.items():
            token = self.styles.get(domain, "")
            if not token or token.split() != [token]:
                raise ValueError(
                    f"`synthetic.styles` must have the token of `synthetic.embeddings` for {domain}, one word, "
                    f"but it is {json.dumps(self.styles.get(domain))}"
                )
            if files.setdefault(token, file) != file:
                raise ValueError(
                    f"`synthetic.embeddings` must have one file for each token, but `{token}` has {files[token]} "
                    f"and {file}"
                )
        return self

    def check(self, data: Data) -> None:
        """Raise ValueError if a domain of the clients has no style, or a style is for an unknown domain."""
        for domain in self.styles:
            if domain not in data.domains:
                hint = near(domain, data.domains) or f"; those of `data.domains` are {', '.join(data.domains)}"
                raise ValueError(f"`synthetic.styles` names `{domain}`, which is no domain of the data{hint}")
        if STYLE in self.template:
            for domain in data.training_domains:
                if not self.styles.get(domain):
                    raise ValueError(
                        "`synthetic.styles` must have words for every domain that clients have, but has none for "
                        f"{domain}"
                    )

    def prompt(self, domain: str, class_name: str) -> str:
        """Return the prompt for an image of a class, with its name written as words."""
        words = {CLASS: readable(class_name), STYLE: self.styles.get(domain, "")}
        return _PLACE.sub(lambda place: words[place[0]], self.template)

    def generator(self, domain: str, class_name: str, number: int) -> torch.Generator:
        """Return the random generator of an image's noise, which does not depend on other images."""
        return torch.Generator().manual_seed(derived_seed(self.seed, "diffusers", domain, class_name, number))

    def set_name(self, data: FederatedData) -> str:
        """Return the name of the prepared set: the data set's name and a digest of the recipe."""
        recipe = [self.model_dump(mode="json", exclude={"share"}), data.name, data.class_names]
        digest = hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()
        return f"{data.name[:60]}-synthetic-{digest[:12]}"  # a name has at most 100 characters

    def make(self, data: FederatedData, proxy: Mapping[str, ImageSet], seed: int) -> dict[str, ImageSet]:
        """Draw `share` of each domain's number of images from the generated ones, evenly over its classes."""
        self._generated(data)
        hint = "; `fedsweep data generate EXPERIMENT` makes the others"
        return _draw(self.set_name(data), self, data, seed, f"`synthetic` {self.name}", hint)

    def fingerprint(self, data: FederatedData) -> str:
        """Return the digest of the generated set."""
        return self._generated(data).digest

    def _generated(self, data: FederatedData) -> StoreCard:
        """Return the card of the images, or raise UserError unless it has all domains of the clients."""
        folder = store_folder(self.set_name(data), size_of(data))
        card = read_card(folder) if is_store(folder) else None
        missing = [domain.name for domain in data.domains if card is None or domain.name not in card.domains]
        if card is None or missing:
            lacks = "" if card is None else f" of {', '.join(missing)}"
            raise UserError(
                f"`synthetic` diffusers: the images{lacks} are not generated yet; `fedsweep data generate EXPERIMENT` "
                "makes them."
            )
        return card
