"""Data sets with one list of images per domain: DomainNet, NICO++, Office-Home and ImageCLEF-DA."""

from pathlib import Path

from fedsweep.common.errors import UserError
from fedsweep.preparation.layouts.base import Item, Listing, Source
from fedsweep.preparation.layouts.disk_listing import (
    Present,
    first_folder,
    join,
    look,
    look_at_root,
    read_list,
    refuse_twice,
    unexpected,
)
from fedsweep.preparation.layouts.layout_rules import label_within, listing, tree
from fedsweep.preparation.layouts.list_files import find_lists, list_domains

_DOMAINNET_CLASSES = 345
_DOMAINNET_DOMAINS = frozenset({"clipart", "infograph", "painting", "quickdraw", "real", "sketch"})


class DomainNet(Source):
    """The images that the lists name; without `num_classes`, the first 100 classes, or all if there are fewer."""

    name = "domainnet"
    looks_like = "<domain>/<class>/*.jpg, splits/<domain>_{train,test}.txt"
    num_classes = 100

    def list(self, root: Path, num_classes: int | None = None) -> Listing:
        """All images of the first `num_classes` classes."""
        look_at_root(root)
        lists = find_lists(root, ("splits", ""))
        if not lists:
            raise unexpected(root, self.name, "`splits/<domain>_train.txt` or `<domain>_train.txt`")
        return list_domains(root, lists, ("",), _DOMAINNET_CLASSES, _DOMAINNET_DOMAINS, num_classes, self.num_classes)


_NICO_DOMAINS = frozenset({"autumn", "dim", "grass", "outdoor", "rock", "water"})
_NICO_CLASSES = 60
_NICO_LISTS = ("NICO_DG_official", "NICO_DG/splits", "NICO_DG", "splits", "")
_BASES = ("", "NICO_DG")
_NICO_FOLDERS = (*_BASES, "public_dg_0416/train", "track_1/public_dg_0416/train", "nico/train", "train")


class Nico(Source):
    """What the lists name where there are lists, else the folders."""

    name = "nico"
    looks_like = "NICO_DG/<domain>/<class>/*.jpg, NICO_DG_official/<domain>_{train,test}.txt or no lists"

    def list(self, root: Path, num_classes: int | None = None) -> Listing:
        """All images of the first `num_classes` classes."""
        look_at_root(root)
        lists = find_lists(root, _NICO_LISTS, _NICO_DOMAINS)
        if lists:
            return list_domains(root, lists, _BASES, _NICO_CLASSES, _NICO_DOMAINS, num_classes, self.num_classes)
        base = first_folder(root, _NICO_FOLDERS, lambda there: bool(_NICO_DOMAINS & set(there.folders)))
        if base is None:
            folders = "`NICO_DG/<domain>/` or `public_dg_0416/train/<domain>/` with domains such as `autumn`"
            raise unexpected(root, self.name, f"`NICO_DG_official/<domain>_train.txt`, {folders}")
        domains = sorted(_NICO_DOMAINS & set(look(root / base).folders))
        images = tree(root, [(domain, join(base, domain), None) for domain in domains])
        return listing(root, images.class_names, images.items(), num_classes, _NICO_DOMAINS)


_OFFICE_HOME_DOMAINS = {"art": "Art", "clipart": "Clipart", "product": "Product", "realworld": "Real World"}
_OFFICE_HOME_FOLDERS = ("", "OfficeHomeDataset_10072016")  # the second is what the archive unpacks to


class OfficeHome(Source):
    """The class folders of each domain."""

    name = "office_home"
    looks_like = "{Art,Clipart,Product,Real World}/<class>/*.jpg"

    def list(self, root: Path, num_classes: int | None = None) -> Listing:
        """All images of the first `num_classes` classes."""
        look_at_root(root)
        base = first_folder(
            root,
            _OFFICE_HOME_FOLDERS,
            lambda there: any(_plain(name) in _OFFICE_HOME_DOMAINS for name in there.folders),
        )
        if base is None:
            raise unexpected(root, self.name, "the folders `Art`, `Clipart`, `Product`, `Real World`")
        folders: dict[str, str] = {}
        for name in look(root / base).folders:
            domain = _OFFICE_HOME_DOMAINS.get(_plain(name))
            if domain in folders:
                raise UserError(f"{root / base}: `{folders[domain]}` and `{name}` are both the domain `{domain}`.")
            if domain is not None:
                folders[domain] = name
        images = tree(root, [(domain, join(base, name), None) for domain, name in folders.items()])
        return listing(root, images.class_names, images.items(), num_classes, _OFFICE_HOME_DOMAINS.values())


def _plain(name: str) -> str:
    return name.casefold().replace("_", "").replace("-", "").replace(" ", "")


_IMAGECLEF_CLASSES = (
    *("aeroplane", "bike", "bird", "boat", "bottle", "bus"),
    *("car", "dog", "horse", "monitor", "motorbike", "people"),
)
_IMAGECLEF_LISTS = {"bList.txt": "b", "cList.txt": "c", "iList.txt": "i", "pList.txt": "p"}


class ImageClef(Source):
    """The images that the lists name."""

    name = "imageclef"
    looks_like = "{b,c,i,p}/**/*.jpg, list/{b,c,i,p}List.txt"

    def list(self, root: Path, num_classes: int | None = None) -> Listing:
        """All images of the first `num_classes` classes."""
        look_at_root(root)
        place = first_folder(root, ("list", ""), lambda there: bool(_IMAGECLEF_LISTS.keys() & set(there.files)))
        if place is None:
            raise unexpected(root, self.name, "`list/{b,c,i,p}List.txt` or `{b,c,i,p}List.txt`")
        present = Present(root)
        lines, items = [], []
        for name in look(root / place).files:
            if name not in _IMAGECLEF_LISTS:
                continue
            for line in read_list(root, join(place, name)):
                label = label_within(line, len(_IMAGECLEF_CLASSES))
                present.require(line.path, line.where)
                lines.append(line)
                items.append(Item(line.path, label, _IMAGECLEF_LISTS[name], None))
        refuse_twice(lines, by_label=True)
        return listing(root, _IMAGECLEF_CLASSES, items, num_classes, _IMAGECLEF_LISTS.values())
