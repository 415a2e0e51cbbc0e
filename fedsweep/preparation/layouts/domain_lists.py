"""The layouts of DomainNet, NICO++, Office-Home and ImageCLEF-DA, most of which have lists of each domain's images."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from fedsweep.common.errors import UserError
from fedsweep.preparation.layouts.base import (
    BOTH,
    ExistingFiles,
    Item,
    Layout,
    Line,
    Listing,
    label_within,
    read_list,
    refuse_twice,
    tree,
)
from fedsweep.preparation.layouts.disk_listing import fold, join, list_folder, unexpected


def _find_lists(root: Path, places: Iterable[str], only: frozenset[str] | None = None) -> dict[str, str]:
    """Find the training list and the test list of each domain.

    The folders `places` are searched in order, and the first folder with lists is used. If `only` is given, lists of
    domains that are not in `only` are ignored. Raise UserError if a domain has only one of the two lists.

    Returns:
        A dict from domain to a path relative to the root. The path has no ending and stands for both lists:
        `splits/real` stands for `splits/real_train.txt` and `splits/real_test.txt`.
    """
    for place in places:
        files = list_folder(root / place).files if (root / place).is_dir() else ()
        train = {name.removesuffix("_train.txt") for name in files if name.endswith("_train.txt")}
        test = {name.removesuffix("_test.txt") for name in files if name.endswith("_test.txt")}
        if only is not None:
            train, test = train & only, test & only
        if not train:
            continue
        for domain in sorted(train ^ test):
            found, missing = BOTH if domain in train else BOTH[::-1]
            raise UserError(f"{root / place} has the list `{domain}_{found}.txt`, but not `{domain}_{missing}.txt`.")
        return {domain: join(place, domain) for domain in sorted(train)}
    return {}


def _names_from_folders(lines: Sequence[Line], most: int) -> tuple[str, ...]:
    """Return the class names in the order of their labels, with "" for unused labels.

    A class has the name of the folder with its images. Raise UserError if a label is not below `most`, or if labels and
    folders do not match one to one.
    """
    by_label: dict[int, tuple[str, str]] = {}
    by_name: dict[str, tuple[int, str]] = {}
    for line in lines:
        label = label_within(line, most)
        name = line.path.split("/")[-2] if "/" in line.path else ""
        if not name:
            raise UserError(f"{line.where}: an image must be in a class folder, but its path is `{line.path}`.")
        named, place = by_label.setdefault(label, (name, line.where))
        if named != name:
            raise UserError(f"{line.where}: label {label} is class `{name}` here, but `{named}` in {place}.")
        other, place = by_name.setdefault(name, (label, line.where))
        if other != label:
            raise UserError(f"{line.where}: class `{name}` has label {label} here, but {other} in {place}.")
    return tuple(by_label.get(label, ("", ""))[0] for label in range(max(by_label) + 1))


def _read_lists(
    root: Path, lists: Mapping[str, str], bases: Sequence[str], most: int, num_classes: int | None
) -> tuple[tuple[str, ...], tuple[Item, ...]]:
    """Return the class names and the images that are listed in training and test lists.

    If only some domains have an image folder, the domains without an image folder are skipped.

    Args:
        root: The folder of the data set.
        lists: A dict from domain to the path of its lists, as returned by `_find_lists`.
        bases: The folders to which the listed paths may be relative. The first folder that contains the first listed
            image is used.
        most: The number of classes of the published data set. All labels must be below `most`.
        num_classes: The number of classes whose images must exist, counted from label 0; None for all classes.
    """
    unpacked = {domain for domain in lists if any((root / base / domain).is_dir() for base in bases)}
    lines = [
        line
        for domain, path in lists.items()
        if domain in unpacked or not unpacked  # without any folder, the first line leads to an error message
        for split in BOTH
        for line in read_list(root, f"{path}_{split}.txt", domain, split)
    ]
    refuse_twice(lines)
    names = _names_from_folders(lines, most)
    base = next((base for base in bases if (root / base / lines[0].path).is_file()), "")
    existing, items = ExistingFiles(root), []
    for line in lines:
        path, label = join(base, line.path), label_within(line, most)
        if num_classes is None or label < num_classes:  # images of other classes need not be unpacked
            existing.require(path, line.where)
        items.append(Item(path, label, line.domain, line.split))
    return names, tuple(items)


_DOMAINNET_CLASSES = 345
_DOMAINNET_DOMAINS = frozenset({"clipart", "infograph", "painting", "quickdraw", "real", "sketch"})


class DomainNet(Layout):
    """The layout of DomainNet: a training list and a test list per domain.

    By default, only the first 100 classes are read.
    """

    name = "domainnet"
    looks_like = "<domain>/<class>/*.jpg, splits/<domain>_{train,test}.txt"
    num_classes = 100

    def _find(self, root: Path, num_classes: int | None) -> Listing:
        lists = _find_lists(root, ("splits", ""))
        if not lists:
            raise unexpected(root, self.name, "`splits/<domain>_train.txt` or `<domain>_train.txt`")
        names, items = _read_lists(root, lists, ("",), _DOMAINNET_CLASSES, num_classes)
        return Listing(names, (*_DOMAINNET_DOMAINS, *lists), items)


_NICO_DOMAINS = frozenset({"autumn", "dim", "grass", "outdoor", "rock", "water"})
_NICO_CLASSES = 60
_NICO_LISTS = ("NICO_DG_official", "NICO_DG/splits", "NICO_DG", "splits", "")
_NICO_BASES = ("", "NICO_DG")
_NICO_FOLDERS = (*_NICO_BASES, "public_dg_0416/train", "track_1/public_dg_0416/train", "nico/train", "train")


class Nico(Layout):
    """The layout of NICO++: a training list and a test list per domain.

    If there are no lists, the images are read from folders `<domain>/<class>/`.
    """

    name = "nico"
    looks_like = "NICO_DG/<domain>/<class>/*.jpg, NICO_DG_official/<domain>_{train,test}.txt or no lists"

    def _find(self, root: Path, num_classes: int | None) -> Listing:
        if lists := _find_lists(root, _NICO_LISTS, _NICO_DOMAINS):
            names, items = _read_lists(root, lists, _NICO_BASES, _NICO_CLASSES, num_classes)
            return Listing(names, tuple(_NICO_DOMAINS), items)
        folders = "`NICO_DG/<domain>/` or `public_dg_0416/train/<domain>/` with domains such as `autumn`"
        looked_for = f"`NICO_DG_official/<domain>_train.txt`, {folders}"
        base = self._folder(root, _NICO_FOLDERS, lambda one: not _NICO_DOMAINS.isdisjoint(one.folders), looked_for)
        domains = sorted(_NICO_DOMAINS.intersection(list_folder(root / base).folders))
        return tree(root, [(domain, join(base, domain), None) for domain in domains], tuple(_NICO_DOMAINS))


_OFFICE_HOME_DOMAINS = {"art": "Art", "clipart": "Clipart", "product": "Product", "realworld": "Real World"}
_OFFICE_HOME_FOLDERS = ("", "OfficeHomeDataset_10072016")  # the second is the folder in the published archive


class OfficeHome(Layout):
    """The layout of Office-Home: a folder per domain that contains a folder per class."""

    name = "office_home"
    looks_like = "{Art,Clipart,Product,Real World}/<class>/*.jpg"

    def _find(self, root: Path, num_classes: int | None) -> Listing:
        base = self._folder(
            root,
            _OFFICE_HOME_FOLDERS,
            lambda folder: any(fold(name) in _OFFICE_HOME_DOMAINS for name in folder.folders),
            "the folders `Art`, `Clipart`, `Product`, `Real World`",
        )
        folders: dict[str, str] = {}
        for name in list_folder(root / base).folders:
            domain = _OFFICE_HOME_DOMAINS.get(fold(name))
            if domain is not None and (other := folders.setdefault(domain, name)) != name:
                raise UserError(f"{root / base}: `{other}` and `{name}` are both the domain `{domain}`.")
        places = [(domain, join(base, name), None) for domain, name in folders.items()]
        return tree(root, places, tuple(_OFFICE_HOME_DOMAINS.values()))


_IMAGECLEF_CLASSES = (
    *("aeroplane", "bike", "bird", "boat", "bottle", "bus"),
    *("car", "dog", "horse", "monitor", "motorbike", "people"),
)
_IMAGECLEF_LISTS = {"bList.txt": "b", "cList.txt": "c", "iList.txt": "i", "pList.txt": "p"}


class ImageClef(Layout):
    """The layout of ImageCLEF-DA: a list of images per domain."""

    name = "imageclef"
    looks_like = "{b,c,i,p}/**/*.jpg, list/{b,c,i,p}List.txt"

    def _find(self, root: Path, num_classes: int | None) -> Listing:
        looked_for = "`list/{b,c,i,p}List.txt` or `{b,c,i,p}List.txt`"
        place = self._folder(root, ("list", ""), lambda one: bool(_IMAGECLEF_LISTS.keys() & {*one.files}), looked_for)
        names = sorted(_IMAGECLEF_LISTS.keys() & set(list_folder(root / place).files))
        lines = [one for name in names for one in read_list(root, join(place, name), _IMAGECLEF_LISTS[name], None)]
        existing, items = ExistingFiles(root), []
        for line in lines:
            items.append(Item(line.path, label_within(line, len(_IMAGECLEF_CLASSES)), line.domain, None))
            existing.require(line.path, line.where)
        refuse_twice(lines, by_label=True)
        return Listing(_IMAGECLEF_CLASSES, tuple(_IMAGECLEF_LISTS.values()), tuple(items))
