"""Data sets as folders of classes or of domains with classes, and EuroSAT."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Literal

from fedsweep.common.errors import UserError
from fedsweep.preparation.layouts.base import Found, Layout, Split, tree
from fedsweep.preparation.layouts.disk_listing import Folder, join, list_folder, summarise_list, unexpected

SPLITS: dict[str, Split] = {"train": "train", "val": "test", "valid": "test", "validation": "test", "test": "test"}
"""Splits by their lower-case folder names in published data sets."""


class Classes(Layout):
    """Folders of classes, or folders of splits with folders of classes."""

    name = "classes"
    looks_like = "<class>/* or {train,val,test}/<class>/*"

    def _find(self, root: Path, num_classes: int | None) -> Found:
        outer, domain = list_folder(root), domain_of(root)
        if has_splits(root, outer, above="classes"):
            return replace(tree(root, [(domain, name, SPLITS[name.lower()]) for name in outer.folders]), nameless=True)
        if any(list_folder(root / name).images for name in outer.folders):
            return replace(tree(root, [(domain, "", None)]), nameless=True)
        raise unexpected(root, self.name, "`<class>/<image>` or `{train,val,test}/<class>/<image>`")


def domain_of(root: Path) -> str:
    """Return the name of the only domain of a data set without domains: that of its folder, or of a link to it."""
    return os.path.basename(os.path.abspath(root))


def has_splits(root: Path, outer: Folder, above: Literal["classes", "domains"]) -> bool:
    """Return whether every folder of the root is named after a split and contains only folders of kind `above`."""
    if not outer.folders or any(name.lower() not in SPLITS for name in outer.folders):
        return False
    inner = {name: list_folder(root / name) for name in outer.folders}
    if any(folder.images or not folder.folders for folder in inner.values()):
        return False
    deeper = [root / name / folder for name, one in inner.items() for folder in one.folders]
    if any(list_folder(folder).images for folder in deeper):
        return above == "classes"
    return above == "domains" and any(list_folder(folder).folders for folder in deeper)


class Domains(Layout):
    """Folders of domains with folders of classes, and folders of splits above or between them."""

    name = "domains"
    looks_like = "[{train,val,test}/]<domain>/[{train,val,test}/]<class>/*"

    def _find(self, root: Path, num_classes: int | None) -> Found:
        outer = list_folder(root)
        if not outer.folders:
            raise unexpected(root, self.name, "`<domain>/<class>/<image>`")
        found = tree(root, _places(root, outer))
        names = [str(name) for name in found.class_names]
        if all(name.lower() in SPLITS for name in names):
            raise UserError(
                f"{root}: class folders must be called after classes, but they are {summarise_list(names)}; "
                "`{train,test}/<domain>/<class>/<image>` and `<domain>/{train,test}/<class>/<image>` would be read."
            )
        return found


def _places(root: Path, outer: Folder) -> list[tuple[str, str, Split | None]]:
    """Return the domain, path within the root and split of each folder that contains class folders."""
    if has_splits(root, outer, above="domains"):
        return [
            (domain, join(split, domain), SPLITS[split.lower()])
            for split in outer.folders
            for domain in list_folder(root / split).folders
        ]
    places: list[tuple[str, str, Split | None]] = []
    for domain in outer.folders:
        inner = list_folder(root / domain)
        if has_splits(root / domain, inner, above="classes"):
            places += [(domain, join(domain, split), SPLITS[split.lower()]) for split in inner.folders]
        else:
            places.append((domain, domain, None))
    return places


_EUROSAT_FOLDERS = ("2750", "EuroSAT/2750", "eurosat/2750", "EuroSAT_RGB", "EuroSAT", "")


class EuroSat(Layout):
    """EuroSAT: folders of classes."""

    name = "eurosat"
    looks_like = "[2750/ or EuroSAT/]<class>/*.jpg"

    def _find(self, root: Path, num_classes: int | None) -> Found:
        for base in _EUROSAT_FOLDERS:
            folder = root / base
            if folder.is_dir() and any(list_folder(folder / name).images for name in list_folder(folder).folders):
                return tree(root, [(self.name, base, None)])
        raise unexpected(root, self.name, "class folders with images in `2750/`, `EuroSAT/` or at the root")
