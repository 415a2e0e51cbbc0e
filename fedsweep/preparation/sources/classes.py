"""A user's own data set without domains: `<class>/<image>`, or `{train,val,test}/<class>/<image>`.

The one domain is named after the root folder. Labels are alphabetical. Without folders of splits there is no split;
with them, all but `train` are test. Files beside the class folders, and files that are no images, are ignored.
"""

import os
from dataclasses import replace
from pathlib import Path
from typing import Literal

from fedsweep.preparation.sources.base import Listing, Source, Split
from fedsweep.preparation.sources.checks import listing, tree
from fedsweep.preparation.sources.files import Folder, look, look_at_root, unexpected

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
