"""The layouts of data sets with a folder per class, with or without folders per domain and split."""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal

from fedsweep.common.errors import UserError, summarise_list
from fedsweep.preparation.layouts.base import Layout, ListedSplit, Listing, tree
from fedsweep.preparation.layouts.disk_listing import Folder, join, list_folder, unexpected

SPLITS: dict[str, ListedSplit] = {
    "train": "train",
    "val": "validation",
    "valid": "validation",
    "validation": "validation",
    "test": "test",
}
"""A dict from names of folders in published data sets, in lower case, to splits."""


class Classes(Layout):
    """The layout with a folder per class, or with a folder per split that contains a folder per class."""

    name = "classes"
    looks_like = "<class>/* or {train,val,test}/<class>/*"

    def _find(self, root: Path, num_classes: int | None) -> Listing:
        outer, domain = list_folder(root), domain_of(root)
        if below_splits(outer) == "classes":
            return replace(tree(root, [(domain, name, SPLITS[name.lower()]) for name in outer.folders]), nameless=True)
        if any(folder.images for folder in outer.inner()):
            return replace(tree(root, [(domain, "", None)]), nameless=True)
        raise unexpected(root, self.name, "`<class>/<image>` or `{train,val,test}/<class>/<image>`")


def domain_of(root: Path) -> str:
    """Return the name of the root folder; if the root is a link, return the name of the link.

    Layouts without domains use this name for their only domain.
    """
    return os.path.basename(os.path.abspath(root))


def below_splits(outer: Folder) -> Literal["classes", "domains"] | None:
    """Return which kind of folders (classes or domains) the split folders in `outer` contain.

    Class folders contain images, and domain folders contain folders. Return None if the split folders contain neither,
    or if any folder in `outer` is not a split folder. A split folder is named after a split, such as `train`,
    contains subfolders and contains no images.
    """
    if not outer.folders or any(name.lower() not in SPLITS for name in outer.folders):
        return None
    splits = [*outer.inner()]
    if any(split.images or not split.folders for split in splits):
        return None
    deeper = [folder for split in splits for folder in split.inner()]
    if any(folder.images for folder in deeper):
        return "classes"
    return "domains" if any(folder.folders for folder in deeper) else None


class Domains(Layout):
    """The layout `<domain>/<class>/<image>`, optionally with split folders above or below the domain folders."""

    name = "domains"
    looks_like = "[{train,val,test}/]<domain>/[{train,val,test}/]<class>/*"

    def _find(self, root: Path, num_classes: int | None) -> Listing:
        outer = list_folder(root)
        if not outer.folders:
            raise unexpected(root, self.name, "`<domain>/<class>/<image>`")
        found = tree(root, [*_places(outer)])
        names = found.class_names
        if all(name.lower() in SPLITS for name in names):
            raise UserError(
                f"{root}: class folders must be named after classes, but they are {summarise_list(names)}; the layout "
                "must be `{train,test}/<domain>/<class>/<image>` or `<domain>/{train,test}/<class>/<image>`."
            )
        return found


def _places(outer: Folder) -> Iterator[tuple[str, str, ListedSplit | None]]:
    """Yield the domain, the path relative to the root, and the split (or None) of each folder with class folders."""
    within = below_splits(outer) == "domains"
    for inner in outer.inner():
        name = inner.path.name
        if within:
            yield from ((domain, join(name, domain), SPLITS[name.lower()]) for domain in inner.folders)
        elif below_splits(inner) == "classes":
            yield from ((name, join(name, split), SPLITS[split.lower()]) for split in inner.folders)
        else:
            yield name, name, None


_EUROSAT_FOLDERS = ("2750", "EuroSAT/2750", "eurosat/2750", "EuroSAT_RGB", "EuroSAT", "")


class EuroSat(Layout):
    """The layout of EuroSAT: a folder per class."""

    name = "eurosat"
    looks_like = "[2750/ or EuroSAT/]<class>/*.jpg"

    def _find(self, root: Path, num_classes: int | None) -> Listing:
        looked_for = "class folders with images in `2750/`, `EuroSAT/` or at the root"
        base = self._folder(root, _EUROSAT_FOLDERS, lambda one: any(inner.images for inner in one.inner()), looked_for)
        return tree(root, [(self.name, base, None)])
