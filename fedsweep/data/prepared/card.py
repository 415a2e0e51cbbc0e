"""The cards and the folders of prepared data sets. No torch, no pyarrow."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from fedsweep.common.config import Config
from fedsweep.common.errors import UserError, near
from fedsweep.common.paths import data_folder, inside
from fedsweep.common.yaml_values import read_json

CARD = "card.json"


class DomainCard(Config):
    """The image counts and the size of a domain's file."""

    train: int = Field(ge=0, description="training images")
    test: int = Field(ge=0, description="test images")
    bytes: int = Field(ge=0, description="size of the Arrow file")


class StoreCard(Config):
    """The description of a prepared data set, written last: a folder without it is not a store."""

    what_a_name_is = "an entry of a prepared data set's card"

    format: Literal[1] = 1
    name: str
    size: int = Field(gt=0, description="height and width of the images, pixels")
    layout: str = Field(description="the layout that it was read from")
    class_names: tuple[str, ...]
    domains: dict[str, DomainCard]
    digest: str = Field(description="SHA-256 of classes, domains, split, labels and pixels; see `content_digest`")
    crop_pct: float = Field(description="share of the short side that the centre crop keeps")
    crop_mode: str = Field("center", description="timm's: center keeps the aspect ratio, squash does not")
    interpolation: str = "bicubic"
    test_fraction: float | None = Field(None, description="share of each class drawn for the test split; null: listed")
    skipped: tuple[str, ...] = Field((), description="images that could not be decoded")
    plan: str = Field("", description="SHA-256 of the source's listing and of all options")
    times: str = Field("", description="SHA-256 of when the source's files were last changed; empty in older cards")
    made_with: str = Field("", description="the decoder, whose version decides about the last bit of a pixel")

    @property
    def images(self) -> int:
        """Number of training and test images of all domains."""
        return sum(domain.train + domain.test for domain in self.domains.values())

    @property
    def bytes(self) -> int:
        """Size of the files of all domains."""
        return sum(domain.bytes for domain in self.domains.values())


def store_folder(name: str, size: int) -> Path:
    """Return the folder of a prepared data set."""
    return data_folder() / f"{name}-{size}"


def is_store(folder: Path) -> bool:
    """Return whether a folder contains a finished preparation."""
    return (folder / CARD).is_file()


def stores() -> list[Path]:
    """Return the folders of all prepared data sets, including damaged ones."""
    found = sorted(path.parent for path in data_folder().glob(f"*/{CARD}"))
    return [folder for folder in found if folder.name.rpartition("-")[2].isdigit()]


def unfinished() -> list[Path]:
    """Return the folders of interrupted preparations."""
    return sorted(path.parent for path in data_folder().glob("*.part/done.jsonl"))


def read_card(folder: Path) -> StoreCard:
    """Return the card of a store, or raise UserError unless it fits the folder and all files have their length."""
    card = StoreCard.of(read_json(folder / CARD), str(folder / CARD))
    if folder.name != f"{card.name}-{card.size}":
        raise UserError(
            f"{folder} must hold what its name says, but its card says {card.name} at {card.size} pixels; "
            f"`{card.name}-{card.size}` is the name that it was prepared under."
        )
    for name, domain in card.domains.items():
        path = inside(folder, f"{name}.arrow")
        found = path.stat().st_size if path.exists() else 0
        if found != domain.bytes:
            again = f"`fedsweep data prepare {card.name} --root DIR --size {card.size} --force` would make it again."
            raise UserError(f"{path} must have {domain.bytes} bytes, but it has {found}; {again}")
    return card


def find_store(name: str, size: int | None = None) -> Path:
    """Return the folder of a prepared data set, or raise UserError; `size` may be omitted if there is only one."""
    sizes = prepared_sizes(name)
    if size is None and len(sizes) > 1:
        there = " and ".join(map(str, sizes))
        raise UserError(f"{name} is prepared at {there} pixels; `--size {sizes[0]}` would choose one.")
    if size is None and sizes:
        size = sizes[0]
    if size not in sizes:
        raise UserError(why_missing(name, size))
    return store_folder(name, size)


def prepared_sizes(name: str) -> list[int]:
    """Return the sizes, in pixels, at which a data set is prepared."""
    parts = [folder.name.rpartition("-") for folder in stores()]
    return sorted(int(size) for found, _, size in parts if found == name)


def why_missing(name: str, size: int | None) -> str:
    """Return the error message, with a remedy, for a data set that is not prepared at this size, or at any if None."""
    command = f"`fedsweep data prepare {name} --root DIR{f' --size {size}' if size else ''}`"
    if sizes := prepared_sizes(name):
        return f"{name} is prepared at {' and '.join(map(str, sizes))} pixels, not at {size}; {command} would make it."
    names = dict.fromkeys(folder.name.rpartition("-")[0] for folder in stores())
    hint = near(name, names) or f"; {command} would make it."
    return f"there is no prepared data set `{name}` in {data_folder()}{hint}"
