"""A user's own data set with domains: `<domain>/<class>/<image>`. Labels are alphabetical.

Folders called like splits may lie above the domains, `{train,val,test}/<domain>/<class>/<image>`, or in them,
`<domain>/{train,val,test}/<class>/<image>`; without them there is no split. A class may be missing from a domain. Files
beside the domain folders, and files that are no images, are ignored.
"""

from pathlib import Path

from fedsweep.common.errors import UserError
from fedsweep.preparation.sources.base import Listing, Source, Split
from fedsweep.preparation.sources.checks import listing, tree
from fedsweep.preparation.sources.classes import SPLITS, has_splits
from fedsweep.preparation.sources.files import join, look, look_at_root, some, unexpected


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
