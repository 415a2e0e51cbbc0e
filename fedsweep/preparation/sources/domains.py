"""A user's own data set with domains: `<domain>/<class>/<image>`. Labels are alphabetical; there is no split.

A class may be missing from a domain. Files beside the domain folders, and files that are no images, are ignored.
"""

from pathlib import Path

from fedsweep.preparation.sources.base import Listing, Source
from fedsweep.preparation.sources.checks import listing, tree
from fedsweep.preparation.sources.files import look_at_root, unexpected


class Domains(Source):
    """Every folder is a domain, every folder in it a class."""

    name = "domains"
    looks_like = "<domain>/<class>/*"

    def list(self, root: Path, num_classes: int | None = None) -> Listing:
        """All images of the first `num_classes` classes."""
        there = look_at_root(root)
        if not there.folders:
            raise unexpected(root, self.name, "`<domain>/<class>/<image>`")
        images = tree(root, [(domain, domain, None) for domain in there.folders])
        return listing(root, images.class_names, images.items(), num_classes)
