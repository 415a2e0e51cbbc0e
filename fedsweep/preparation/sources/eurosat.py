"""EuroSAT: 10 classes, 27,000 satellite images of 64 px; one domain, `eurosat`; no split.

Layout: class folders, in `2750/` as the archive of the RGB version unpacks, in `EuroSAT_RGB/`, `EuroSAT/` or at the
root. Labels are alphabetical. The version with 13 bands has .tif files, which are listed as well; whether they decode
is for the decoder to say.

Helber, Bischke, Dengel, Borth. EuroSAT: A Novel Dataset and Deep Learning Benchmark for Land Use and Land Cover
Classification. IEEE JSTARS 12(7), 2019. https://github.com/phelber/EuroSAT
"""

from pathlib import Path

from fedsweep.preparation.sources.base import Listing, Source
from fedsweep.preparation.sources.checks import listing, tree
from fedsweep.preparation.sources.files import look, look_at_root, unexpected

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
