"""NICO++: 60 classes in 6 common contexts (autumn, dim, grass, outdoor, rock, water), 88,866 images.

Two layouts are in use:

- the benchmark's download, which FedRA's code reads: `NICO_DG/<domain>/<class>/<image>` and
  `NICO_DG_official/<domain>_{train,test}.txt`, lines such as `NICO_DG/autumn/hot air balloon/autumn_000001.jpg 12`.
  Labels are the lists', which are not alphabetical. The lists may also lie in `splits/` or beside the domain folders;
- the NICO challenge's download (track 1): `public_dg_0416/train/<domain>/<class>/<image>`, without lists and with a
  test set without labels, which cannot be used. Labels are then alphabetical and there is no split.

Domains whose folder is not there are left out, listed or not.

Zhang, He, Xu, Yu, Shen, Cui. NICO++: Towards Better Benchmarking for Domain Generalization. CVPR 2023.
https://nicochallenge.com/dataset
"""

from pathlib import Path

from fedsweep.preparation.sources.base import Listing, Source
from fedsweep.preparation.sources.checks import listing, tree
from fedsweep.preparation.sources.files import first_folder, join, look, look_at_root, unexpected
from fedsweep.preparation.sources.lists import find_lists, list_domains

_DOMAINS = frozenset({"autumn", "dim", "grass", "outdoor", "rock", "water"})
_CLASSES = 60
_LISTS = ("NICO_DG_official", "NICO_DG/splits", "NICO_DG", "splits", "")
_BASES = ("", "NICO_DG")
_FOLDERS = (*_BASES, "public_dg_0416/train", "track_1/public_dg_0416/train", "nico/train", "train")


class Nico(Source):
    """What the lists name where there are lists, else the folders."""

    name = "nico"
    looks_like = "NICO_DG/<domain>/<class>/*.jpg, NICO_DG_official/<domain>_{train,test}.txt or no lists"

    def list(self, root: Path, num_classes: int | None = None) -> Listing:
        """All images of the first `num_classes` classes."""
        look_at_root(root)
        lists = find_lists(root, _LISTS, _DOMAINS)
        if lists:
            return list_domains(root, lists, _BASES, _CLASSES, _DOMAINS, num_classes, self.num_classes)
        base = first_folder(root, _FOLDERS, lambda there: bool(_DOMAINS & set(there.folders)))
        if base is None:
            folders = "`NICO_DG/<domain>/` or `public_dg_0416/train/<domain>/` with domains such as `autumn`"
            raise unexpected(root, self.name, f"`NICO_DG_official/<domain>_train.txt`, {folders}")
        domains = sorted(_DOMAINS & set(look(root / base).folders))
        images = tree(root, [(domain, join(base, domain), None) for domain in domains])
        return listing(root, images.class_names, images.items(), num_classes, _DOMAINS)
