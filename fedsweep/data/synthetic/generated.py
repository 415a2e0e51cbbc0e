"""Sources of synthetic images: the base class, folders of images, and images of a diffusers checkpoint."""

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
    """The base class of sources of synthetic images."""

    needs_proxy: ClassVar[bool] = False  # True if the source needs the server's proxy images
    stands_in: ClassVar[bool] = False  # True if the source only imitates a generator; results are marked then

    name: str

    @abstractmethod
    def make(self, data: FederatedData, proxy: Mapping[str, ImageSet], seed: int) -> dict[str, ImageSet]:
        """Return synthetic images by domain.

        Args:
            data: The data set.
            proxy: The server's proxy images, by domain.
            seed: The seed of the run.

        Raises:
            UserError: There are too few images.
        """

    def check(self, data: Data) -> None:
        """Raise ValueError if the configuration does not fit the data set; no image is read."""

    def fingerprint(self, data: FederatedData) -> str:
        """Return a digest of the source's images on disk, or an empty string if the source reads no files.

        Raises:
            UserError: The images are missing.
        """
        return ""


class NoSynthetic(Synthetic):
    """No synthetic images."""

    name: Literal["none"] = "none"

    def make(self, data: FederatedData, proxy: Mapping[str, ImageSet], seed: int) -> dict[str, ImageSet]:
        """Return no images."""
        return {}


class Proportioned(Synthetic, ABC):
    """The base class of sources whose number of images is a share of the training images (FedAG, Section 4.1)."""

    share: float = Field(
        0.1, gt=0, le=10, description="number of synthetic images of each domain, as a share of its training images"
    )

    def labels(self, domain: Domain, classes: int) -> Tensor:
        """Return the classes of a domain's synthetic images, int64 (n,), with equal numbers of images per class.

        They are equal because the server does not know how many images of each class the clients have.
        """
        return torch.arange(max(1, round(self.share * len(domain.train)))) % classes

    def wanted(self, domain: Domain, class_names: Sequence[str]) -> list[int]:
        """Return the number of images of each class."""
        return self.labels(domain, len(class_names)).bincount(minlength=len(class_names)).tolist()


class Folder(Proportioned):
    """Images of any generator, which `fedsweep data prepare` has decoded from a folder `<domain>/<class>/<image>`."""

    name: Literal["folder"] = "folder"
    set: str = Field(
        min_length=1, description="name under which the images were prepared, e.g. `office_home_synthetic`"
    )

    def check(self, data: Data) -> None:
        """Raise ValueError if `set` is the clients' data set, which also contains the test images."""
        if isinstance(data, PreparedData) and data.set == self.set:
            raise ValueError(
                f"`synthetic.set` must be a set of generated images, but {self.set} is also `data.set`, "
                "which includes the test images"
            )

    def make(self, data: FederatedData, proxy: Mapping[str, ImageSet], seed: int) -> dict[str, ImageSet]:
        """Return images drawn at random from the prepared set, in equal numbers for all classes of a domain."""
        return _draw(self.set, self, data, seed, f"`synthetic.set` {self.set}")

    def fingerprint(self, data: FederatedData) -> str:
        """Return the digest of the prepared set at the image size of `data`."""
        return _load(self.set, data, f"`synthetic.set` {self.set}").digest


def size_of(data: FederatedData) -> int:
    """Return the height and width of the images in pixels."""
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
    """Load the prepared set `name` with the image size and the domains of `data`."""
    domains = tuple(domain.name for domain in data.domains)
    try:
        found = PreparedData(set=name, size=size_of(data), domains=domains).load()
    except UserError as error:
        sentence = str(error).replace("`data.domains`", "`synthetic.set`").replace("`data.", "`synthetic.")
        raise UserError(sentence) from None
    for stray in found.class_names:
        if stray not in data.class_names:
            raise UserError(
                f"{what} must have only classes of {data.name}, but it has `{stray}`"
                f"{near(stray, data.class_names) or '.'}"
            )
    return found


CLASS, STYLE = "{class}", "{style}"
_PLACE = re.compile(r"\{[^{}]*\}|[{}]")


class Diffusers(Proportioned):
    """Images of every class and domain, generated by a diffusers checkpoint (FedAG, Section 4.1).

    The style of a domain is described by words, or by the token of an embedding that textual inversion has learned.
    """

    name: Literal["diffusers"] = "diffusers"
    model: str = Field(
        min_length=1, description="text-to-image checkpoint: a name on the Hugging Face Hub, or a folder"
    )
    template: str = Field(
        "a photograph of a {class} in {style} style",
        description="prompt; {class} and {style} are replaced with the class name and the style",
    )
    styles: dict[str, str] = Field(
        {}, description="text that replaces {style}, by domain: words, or the token of an embedding"
    )
    embeddings: dict[str, str] = Field(
        {}, description="file with the learned embedding (textual inversion) of the token in `styles`, by domain"
    )
    num_inference_steps: int = Field(50, ge=1, description="number of denoising steps per image")
    guidance_scale: float = Field(7.5, ge=0, description="weight of the prompt in classifier-free guidance")
    image_size: int | None = Field(
        None,
        ge=8,
        multiple_of=8,
        description="height and width of the generated images in pixels; null: the model's own value",
    )
    seed: int = Field(0, ge=0, description="seed of the generation, independent of the run's seed")

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
                    f"`synthetic.styles` must contain the token of `synthetic.embeddings` for {domain}, a single word, "
                    f"but it is {json.dumps(self.styles.get(domain))}"
                )
            if files.setdefault(token, file) != file:
                raise ValueError(
                    f"`synthetic.embeddings` must have one file for each token, but `{token}` has {files[token]} "
                    f"and {file}"
                )
        return self

    def check(self, data: Data) -> None:
        """Raise ValueError if a domain of the clients has no style, or if a style is that of an unknown domain."""
        for domain in self.styles:
            if domain not in data.domains:
                hint = near(domain, data.domains) or f"; `data.domains` are {', '.join(data.domains)}"
                raise ValueError(f"`synthetic.styles` contains `{domain}`, which is not a domain of the data{hint}")
        if STYLE in self.template:
            for domain in data.training_domains:
                if not self.styles.get(domain):
                    raise ValueError(
                        "`synthetic.styles` must contain a style for every domain of the clients, but has none for "
                        f"{domain}"
                    )

    def prompt(self, domain: str, class_name: str) -> str:
        """Return the prompt for an image of a class in the style of a domain; the class name is written in words."""
        words = {CLASS: readable(class_name), STYLE: self.styles.get(domain, "")}
        return _PLACE.sub(lambda place: words[place[0]], self.template)

    def generator(self, domain: str, class_name: str, number: int) -> torch.Generator:
        """Return the random generator for an image's noise, which is independent of the other images."""
        return torch.Generator().manual_seed(derived_seed(self.seed, "diffusers", domain, class_name, number))

    def set_name(self, data: FederatedData) -> str:
        """Return the name of the prepared set of generated images: the data set's name and a digest of the recipe."""
        recipe = [self.model_dump(mode="json", exclude={"share"}), data.name, data.class_names]
        digest = hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()
        return f"{data.name[:60]}-synthetic-{digest[:12]}"  # names are limited to 100 characters

    def make(self, data: FederatedData, proxy: Mapping[str, ImageSet], seed: int) -> dict[str, ImageSet]:
        """Return images drawn at random from the generated ones, in equal numbers for all classes of a domain."""
        self._generated(data)
        hint = "; run `fedsweep data generate EXPERIMENT` to generate the others"
        return _draw(self.set_name(data), self, data, seed, f"`synthetic` {self.name}", hint)

    def fingerprint(self, data: FederatedData) -> str:
        """Return the digest of the prepared set of generated images."""
        return self._generated(data).digest

    def _generated(self, data: FederatedData) -> StoreCard:
        """Return the card of the generated images; raise UserError if images of a domain are missing."""
        folder = store_folder(self.set_name(data), size_of(data))
        card = read_card(folder) if is_store(folder) else None
        missing = [domain.name for domain in data.domains if card is None or domain.name not in card.domains]
        if card is None or missing:
            lacks = "" if card is None else f" of {', '.join(missing)}"
            raise UserError(
                f"`synthetic` diffusers: the images{lacks} are not generated yet; "
                "run `fedsweep data generate EXPERIMENT` to generate them."
            )
        return card
