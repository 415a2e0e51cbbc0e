"""The cards that describe prepared data sets, and functions that find the folders of the data sets.

This module imports neither torch nor pyarrow, so commands that only list data sets start quickly.
"""

from pathlib import Path
from typing import Literal

from pydantic import Field

from fedsweep.common.config import Config
from fedsweep.common.errors import UserError, near
from fedsweep.common.paths import data_folder, inside
from fedsweep.common.yaml_values import read_json

CARD = "card.json"
COPIES = "copies.txt"  # lists the exact copies among the images


class DomainCard(Config):
    """The number of training, test and listed validation images of a domain, and the size of the domain's file."""

    train: int = Field(ge=0, description="number of training images")
    test: int = Field(ge=0, description="number of test images")
    bytes: int = Field(ge=0, description="size of the Arrow file in bytes")
    validation: int | None = Field(
        None,
        ge=0,
        description="number of test images that the data set lists for validation; null in older cards",
    )


class CopiesCard(Config):
    """The groups of images with identical pixels, and the effects of groups of images on the split."""

    groups: int = Field(ge=0, description="number of groups of images with identical pixels")
    both_splits: int = Field(ge=0, description="number of groups with training and test images")
    both_tests: int = Field(
        0, ge=0, description="number of groups with images that are listed for validation and other test images"
    )
    other_classes: int = Field(ge=0, description="number of groups of identical images with different classes")
    example: tuple[str, ...] = Field((), description="the images of the first group of identical images")
    without_test: dict[str, tuple[str, ...]] = Field(
        {}, description="of each domain, the classes that have no test image because groups are on one side"
    )
    without_training: dict[str, tuple[str, ...]] = Field(
        {}, description="of each domain, the classes that have no training image because groups are on one side"
    )


class StoreCard(Config):
    """The description of a prepared data set, stored as `card.json` in its folder.

    The card is written last, so a folder with a card is complete.
    """

    what_a_name_is = "an entry of a prepared data set's card"
    written_by_hand = False

    format: Literal[1] = 1
    name: str
    size: int = Field(gt=0, description="height and width of the images in pixels")
    layout: str = Field(description="layout of the source files")
    class_names: tuple[str, ...]
    domains: dict[str, DomainCard]
    digest: str = Field(
        description="SHA-256 of classes, domains, split, labels, pixels and groups; see `stored_digest`"
    )
    crop_pct: float = Field(description="share of the short side that the centre crop keeps")
    crop_mode: str = Field(
        "center", description="crop mode of timm: `center` keeps the aspect ratio, `squash` does not"
    )
    interpolation: str = "bicubic"
    test_fraction: float | None = Field(
        None,
        description="share of each class drawn at random for the test split; null if the data set has its own split",
    )
    skipped: tuple[str, ...] = Field((), description="images that could not be decoded")
    copies: CopiesCard | None = Field(None, description="exact copies among the images; null in older cards")
    blank: tuple[str, ...] = Field((), description="images that are nearly black or of one colour after decoding")
    plan: str = Field("", description="SHA-256 of the list of source files and of all options")
    times: str = Field("", description="SHA-256 of the source files' modification times; empty in older cards")
    made_with: str = Field("", description="name and version of the decoder, which can affect the last bit of a pixel")

    @property
    def images(self) -> int:
        """The total number of training and test images in all domains."""
        return sum(domain.train + domain.test for domain in self.domains.values())

    @property
    def validation(self) -> int | None:
        """The number of test images in all domains that are listed for validation; None if a domain has no number."""
        numbers = [domain.validation for domain in self.domains.values() if domain.validation is not None]
        return sum(numbers) if len(numbers) == len(self.domains) else None

    @property
    def bytes(self) -> int:
        """The total size of the files of all domains, in bytes."""
        return sum(domain.bytes for domain in self.domains.values())


def store_folder(name: str, size: int) -> Path:
    """Return the folder of the prepared data set `name` with images of `size` x `size` pixels."""
    return data_folder() / f"{name}-{size}"


def is_store(folder: Path) -> bool:
    """Return whether a folder contains a complete prepared data set."""
    return (folder / CARD).is_file()


def stores() -> list[Path]:
    """Return the folders of all prepared data sets, including damaged ones."""
    found = sorted(path.parent for path in data_folder().glob(f"*/{CARD}"))
    return [folder for folder in found if folder.name.rpartition("-")[2].isdigit()]


def unfinished() -> list[Path]:
    """Return the folders of unfinished preparations, which were interrupted or are still running."""
    return sorted(path.parent for path in data_folder().glob("*.part/done.jsonl"))


def read_card(folder: Path) -> StoreCard:
    """Return the card of a prepared data set.

    Raises:
        UserError: The card is malformed or belongs to another folder, or the size of a file differs from the recorded
            size.
    """
    card = StoreCard.of(read_json(folder / CARD), str(folder / CARD))
    if folder.name != f"{card.name}-{card.size}":
        raise UserError(
            f"{folder} must be named `{card.name}-{card.size}`, because its card describes {card.name} "
            f"at {card.size} pixels."
        )
    for name, domain in card.domains.items():
        path = inside(folder, f"{name}.arrow")
        found = path.stat().st_size if path.exists() else 0
        if found != domain.bytes:
            again = (
                f"run `fedsweep data prepare {card.name} --root DIR --size {card.size} --force` to prepare it again."
            )
            raise UserError(f"{path} must have {domain.bytes} bytes, but it has {found}; {again}")
    return card


def find_store(name: str, size: int | None = None) -> Path:
    """Return the folder of a prepared data set.

    Args:
        name: The name of the data set.
        size: The height and width of the images in pixels; None selects the only prepared size.

    Raises:
        UserError: The data set is not prepared at this size, or `size` is None and the data set is prepared at several
            sizes.
    """
    sizes = prepared_sizes(name)
    if size is None and len(sizes) > 1:
        there = " and ".join(map(str, sizes))
        raise UserError(f"{name} is prepared at {there} pixels; choose one, e.g. with `--size {sizes[0]}`.")
    if size is None and sizes:
        size = sizes[0]
    if size not in sizes:
        raise UserError(why_missing(name, size))
    return store_folder(name, size)


def prepared_sizes(name: str) -> list[int]:
    """Return the image sizes in pixels at which a data set is prepared, in ascending order."""
    parts = [folder.name.rpartition("-") for folder in stores()]
    return sorted(int(size) for found, _, size in parts if found == name)


def why_missing(name: str, size: int | None) -> str:
    """Return the error message for a data set that is not prepared at `size`, or at any size if `size` is None."""
    command = f"`fedsweep data prepare {name} --root DIR{f' --size {size}' if size else ''}`"
    if sizes := prepared_sizes(name):
        return (
            f"{name} is prepared at {' and '.join(map(str, sizes))} pixels, not at {size}; run {command} to prepare it."
        )
    names = dict.fromkeys(folder.name.rpartition("-")[0] for folder in stores())
    hint = near(name, names) or f"; run {command} to prepare it."
    return f"there is no prepared data set `{name}` in {data_folder()}{hint}"
