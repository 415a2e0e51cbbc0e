"""Office-Home: 4 domains (Art, Clipart, Product, Real World), 65 classes, about 15,500 images; no split.

Layout: `<domain>/<class>/<image>`, with `ImageInfo.csv` or `imageinfo.txt` beside it, which nothing here needs. Copies
spell the last domain `Real World`, `Real_World`, `RealWorld` or `real_world`; the listing says `Real World` for all, so
that results agree. Labels are alphabetical. Domains that are not there are left out.

Venkateswara, Eusebio, Chakraborty, Panchanathan. Deep Hashing Network for Unsupervised Domain Adaptation. CVPR 2017.
https://www.hemanthdv.org/officeHomeDataset.html
"""

from pathlib import Path

from fedsweep.common.errors import UserError
from fedsweep.preparation.sources.base import Listing, Source
from fedsweep.preparation.sources.checks import listing, tree
from fedsweep.preparation.sources.files import first_folder, join, look, look_at_root, unexpected

_DOMAINS = {"art": "Art", "clipart": "Clipart", "product": "Product", "realworld": "Real World"}
_FOLDERS = ("", "OfficeHomeDataset_10072016")  # the second is what the archive unpacks to


class OfficeHome(Source):
    """The class folders of each domain."""

    name = "office_home"
    looks_like = "{Art,Clipart,Product,Real World}/<class>/*.jpg"

    def list(self, root: Path, num_classes: int | None = None) -> Listing:
        """All images of the first `num_classes` classes."""
        look_at_root(root)
        base = first_folder(root, _FOLDERS, lambda there: any(_plain(name) in _DOMAINS for name in there.folders))
        if base is None:
            raise unexpected(root, self.name, "the folders `Art`, `Clipart`, `Product`, `Real World`")
        folders: dict[str, str] = {}
        for name in look(root / base).folders:
            domain = _DOMAINS.get(_plain(name))
            if domain in folders:
                raise UserError(f"{root / base}: `{folders[domain]}` and `{name}` are both the domain `{domain}`.")
            if domain is not None:
                folders[domain] = name
        images = tree(root, [(domain, join(base, name), None) for domain, name in folders.items()])
        return listing(root, images.class_names, images.items(), num_classes, _DOMAINS.values())


def _plain(name: str) -> str:
    return name.casefold().replace("_", "").replace("-", "").replace(" ", "")
