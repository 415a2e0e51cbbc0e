"""Data sets as folders: of classes, of domains with classes, and EuroSAT."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Literal

from fedsweep.common.errors import UserError
from fedsweep.preparation.layouts.base import Listing, Source, Split
from fedsweep.preparation.layouts.disk_listing import Folder, join, look, look_at_root, some, unexpected
from fedsweep.preparation.layouts.layout_rules import listing, tree

SPLITS: dict[str, Split] = {"train": "train", "val": "test", "valid": "test", "validation": "test", "test": "test"}
"""What the splits of other people's data sets are called, in lower case."""


class Classes(Source):
    """Every folder is a class, or every folder is a split and every folder in it a class."""

    name = "classes"
    looks_like = "<class>/* or {train,val,test}/<class>/*"

    def list(self, root: Path, num_classes: int | None = None) -> Listing:
        """All images of the first `num_classes` classes."""
        there = look_at_root(root)
        domain = domain_of(root)
        if has_splits(root, there, above="classes"):
            images = tree(root, [(domain, name, SPLITS[name.lower()]) for name in there.folders])
        elif any(look(root / name).images for name in there.folders):
            images = tree(root, [(domain, "", None)])
        else:
            raise unexpected(root, self.name, "`<class>/<image>` or `{train,val,test}/<class>/<image>`")
        return replace(listing(root, images.class_names, images.items(), num_classes), nameless=True)


def domain_of(root: Path) -> str:
    """The name of the one domain of a data set without domains: its folder's, a link's own name where it is one."""
    return os.path.basename(os.path.abspath(root))


def has_splits(root: Path, there: Folder, above: Literal["classes", "domains"]) -> bool:
    """Whether every folder at the root is called like a split and holds, without images between, folders of these."""
    if not there.folders or any(name.lower() not in SPLITS for name in there.folders):
        return False
    inside = {name: look(root / name) for name in there.folders}
    if any(folder.images or not folder.folders for folder in inside.values()):
        return False
    deeper = [root / name / folder for name, one in inside.items() for folder in one.folders]
    if any(look(folder).images for folder in deeper):
        return above == "classes"
    return above == "domains" and any(look(folder).folders for folder in deeper)


class Domains(Source):
    """Every folder is a domain, every folder in it a class, but for folders of splits above or between them."""

    name = "domains"
    looks_like = "[{train,val,test}/]<domain>/[{train,val,test}/]<class>/*"

    def list(self, root: Path, num_classes: int | None = None) -> Listing:
        """All images of the first `num_classes` classes."""
        there = look_at_root(root)
        if not there.folders:
            raise unexpected(root, self.name, "`<domain>/<class>/<image>`")
        images = tree(root, _places(root))
        if all(name.lower() in SPLITS for name in images.class_names):
            raise UserError(
                f"{root}: class folders must be called after classes, but they are {some(images.class_names)}; "
                "`{train,test}/<domain>/<class>/<image>` and `<domain>/{train,test}/<class>/<image>` would be read."
            )
        return listing(root, images.class_names, images.items(), num_classes)


def _places(root: Path) -> list[tuple[str, str, Split | None]]:
    """Domain, folder within the root and split of each folder that holds class folders."""
    there = look_at_root(root)
    if has_splits(root, there, above="domains"):
        return [
            (domain, join(split, domain), SPLITS[split.lower()])
            for split in there.folders
            for domain in look(root / split).folders
        ]
    places: list[tuple[str, str, Split | None]] = []
    for domain in there.folders:
        inside = look(root / domain)
        if has_splits(root / domain, inside, above="classes"):
            places += [(domain, join(domain, split), SPLITS[split.lower()]) for split in inside.folders]
        else:
            places.append((domain, domain, None))
    return places


_FOLDERS = ("2750", "EuroSAT/2750", "eurosat/2750", "EuroSAT_RGB", "EuroSAT", "")


class EuroSat(Source):
    """The class folders."""

    name = "eurosat"
    looks_like = "[2750/ or EuroSAT/]<class>/*.jpg"

    def list(self, root: Path, num_classes: int | None = None) -> Listing:
        """All images of the first `num_classes` classes."""
        look_at_root(root)
        base = next((folder for folder in _FOLDERS if _has_classes(root / folder)), None)
        if base is None:
            raise unexpected(root, self.name, "class folders with images in `2750/`, `EuroSAT/` or at the root")
        images = tree(root, [(self.name, base, None)])
        return listing(root, images.class_names, images.items(), num_classes)


def _has_classes(folder: Path) -> bool:
    return folder.is_dir() and any(look(folder / name).images for name in look(folder).folders)
