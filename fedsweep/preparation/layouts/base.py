"""The base of layouts, which list and read images on disk, the rules for every listing, and list files."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath
from typing import ClassVar, Literal

from fedsweep.common.errors import UserError, near
from fedsweep.common.yaml_values import read_text
from fedsweep.preparation.layouts.disk_listing import Folder, join, list_folder, summarise_list, unexpected

Split = Literal["train", "test"]
BOTH: tuple[Split, Split] = ("train", "test")
_LONGEST_NAME = 200  # bytes; file systems take 255, and the store adds a suffix


@dataclass(frozen=True)
class Item:
    """One image of a data set; `path` is its identity within the root, `split` is None if the layout has none."""

    path: str
    label: int
    domain: str
    split: Split | None


@dataclass(frozen=True)
class Listing:
    """All images of a data set. Labels count from 0 in the order of `class_names`. No domain or class is empty.

    As `Layout._find` returns it, it has all domains of the published data set, and "" for a class without images.
    """

    class_names: tuple[str, ...]
    domains: tuple[str, ...]
    items: tuple[Item, ...]
    absent: tuple[str, ...] = ()  # domains of the data set that are missing in the root
    nameless: bool = False  # True if the layout has no domains, so that the only one is named after the root


class Layout(ABC):
    """A lister of the images under a root and reader of their encoded bytes."""

    name: ClassVar[str]  # the value of `fedsweep data prepare --layout`
    looks_like: ClassVar[str]  # the layout in one line, e.g. `<domain>/<class>/*.jpg, splits/<domain>_{train,test}.txt`
    num_classes: ClassVar[int | None] = None  # how many classes `list` takes by default, from the first on; None: all

    def list(self, root: Path, num_classes: int | None = None) -> Listing:
        """Return the images of the first `num_classes` classes, or raise UserError for another layout or empty classes.

        Their order depends on names only.
        """
        found = self._find(root, self.num_classes if num_classes is None else num_classes)
        names = found.class_names
        count = num_classes if num_classes is not None else min(self.num_classes or len(names), len(names))
        if not 1 <= count <= len(names):
            raise UserError(f"`--classes` must be within 1..{len(names)}, the classes of {root}, but it is {count}.")
        kept = [item for item in found.items if item.label < count]
        used = {item.label for item in kept}
        if empty := [names[label] or f"label {label}" for label in range(count) if label not in used]:
            raise UserError(f"{root}: a class must have images, but {_have(empty)} none in any domain.")
        domains = sorted({item.domain for item in kept})
        if lost := sorted({item.domain for item in found.items}.difference(domains)):
            raise UserError(f"{root}: a domain must have images, but {_have(lost)} none of {count} classes.")
        check_domains(root, domains)
        for item in kept:
            if not item.path.isascii():
                _check_text(root, item.path)
        kept.sort(key=lambda item: (item.domain, self._order(item.path), item.label))
        absent = tuple(sorted({*found.domains}.difference(domains)))
        return Listing(names[:count], tuple(domains), tuple(kept), absent, found.nameless)

    @abstractmethod
    def _find(self, root: Path, num_classes: int | None) -> Listing:
        """Return all images; after the first `num_classes` classes, they need not exist on the disk."""

    def _order(self, path: str) -> tuple[str, int]:
        """Return the sort key of an image within its domain."""
        return path, 0

    def _folder(self, root: Path, candidates: Iterable[str], fits: Callable[[Folder], bool], looked_for: str) -> str:
        """Return the first candidate folder within the root that exists and fits, or raise UserError."""
        for name in candidates:
            if (root / name).is_dir() and fits(list_folder(root / name)):
                return name
        raise unexpected(root, self.name, looked_for)

    def files(self, items: Iterable[Item]) -> Sequence[str]:
        """Return the files within the root that contain the items: their paths, unless files contain many images."""
        return [*dict.fromkeys(item.path for item in items)]

    def read(self, root: Path, items: Sequence[Item]) -> Iterator[bytes]:
        """Yield the encoded bytes of each item, in order."""
        for item in items:
            yield (root / item.path).read_bytes()


def tree(root: Path, places: Iterable[tuple[str, str, Split | None]], domains: tuple[str, ...] = ()) -> Listing:
    """Return the images at `<folder>/<class>/<image>` for each place (domain, folder within the root, split).

    Labels follow the sorted names of all class folders, even empty ones. Stray images and empty domains are errors.
    """
    names: set[str] = set()
    images: list[tuple[str, str, str, Split | None]] = []
    for domain, folder, split in places:
        before = len(images)
        outer = list_folder(root / folder)
        if folder and outer.images:  # a picture in the root itself may well be a preview
            raise UserError(
                f"{outer.path}: images must lie in a class folder, but `{outer.images[0]}` lies beside them."
            )
        for inner in outer.inner():
            if inner.folders:
                raise UserError(
                    f"{inner.path}: images must lie in the class folder itself, "
                    f"but it holds the folders {summarise_list(inner.folders)}."
                )
            names.add(name := inner.path.name)
            images += [(join(folder, name, image), name, domain, split) for image in inner.images]
        if len(images) == before:
            raise UserError(f"the domain `{domain}` is empty: no images under {outer.path}/<class>/.")
    labels = {name: label for label, name in enumerate(sorted(names))}
    items = (Item(path, labels[name], domain, split) for path, name, domain, split in images)
    return Listing(tuple(labels), domains, tuple(items))


def check_domains(root: Path, domains: Sequence[str]) -> None:
    """Raise UserError if a domain's name cannot name a file, or differs from another in case only."""
    folded: dict[str, str] = {}
    for domain in domains:
        _check_text(root, domain)
        if not domain or domain.startswith(".") or not domain.isprintable() or set(domain) & {"/", "\\"}:
            rule = "must be printable, without `/` and `\\` and a leading dot"
            raise UserError(f"{root}: a domain names a file: it {rule}, but it is {domain!r}.")
        if len(domain.encode()) > _LONGEST_NAME:
            raise UserError(
                f"{root}: a domain names a file: it must have at most {_LONGEST_NAME} bytes, but it is {domain!r}."
            )
        if (other := folded.setdefault(domain.casefold(), domain)) != domain:
            raise UserError(f"{root}: the domains `{other}` and `{domain}` must differ in more than case.")


def _check_text(root: Path, name: str) -> None:
    try:
        name.encode()
    except UnicodeEncodeError:  # bytes of a file name that are not UTF-8
        raise UserError(f"{root}: names must be UTF-8, but one is {name!r}.") from None


def _have(names: Sequence[str]) -> str:
    return f"{summarise_list(names)} {'has' if len(names) == 1 else 'have'}"


@dataclass(frozen=True)
class Line:
    """A line of a list: its place for error messages, the image's path, its label if it has one, and what it lists."""

    where: str
    path: str
    label: int | None
    domain: str
    split: Split | None


def read_lines(root: Path, name: str) -> Iterator[tuple[str, str]]:
    """Yield the place and the text of each line that is not blank: ("splits/real_train.txt, line 3", "...")."""
    # Not splitlines(), which also cuts at separators that a file name may hold.
    for number, line in enumerate(read_text(root / name, "utf-8-sig").split("\n"), start=1):
        if line.strip():
            yield f"{root / name}, line {number}", line.strip()


def read_list(root: Path, name: str, domain: str, split: Split | None, labels: bool = True) -> list[Line]:
    """Return the lines `<path of an image> <label>`, or raise UserError for a malformed line or a path out of the root.

    The list is of a domain and a split. Without `labels`, lines may lack a label.
    """
    lines = []
    for where, text in read_lines(root, name):
        # From the right: the names of NICO++'s classes have spaces ("hot air balloon").
        path, _, last = text.rpartition(" ")
        is_label = last.removeprefix("-").isdecimal() and last.isascii() and bool(path.strip())
        if labels and not is_label:
            raise UserError(f"{where}: must be `<path of an image> <label>`, but it is `{text}`.")
        path = (path.strip() if is_label else text).replace("\\", "/")
        parts = PurePosixPath(path).parts
        if not parts or parts[0] == "/" or ".." in parts:
            raise UserError(f"{where}: a path must lie within the root, but it is `{path}`.")
        lines.append(Line(where, "/".join(parts), int(last) if is_label else None, domain, split))
    if not lines:
        raise UserError(f"the list {root / name} is empty.")
    return lines


class ExistingFiles:
    """The files under a root. Listing each folder once is faster than a query for every file."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._names = cache(
            lambda folder: frozenset(list_folder(root / folder).files) if (root / folder).is_dir() else None
        )

    def require(self, path: str, where: str) -> None:
        """Raise UserError, with near names, if `path`, which a list names at `where`, does not exist."""
        folder, _, name = path.rpartition("/")
        names = self._names(folder)
        if names is None or name not in names:
            why = f": there is no folder `{folder}`." if names is None else near(name, sorted(names)) or "."
            raise UserError(f"{where}: names `{path}`, which is not under {self._root}{why}")


def refuse_twice(lines: Iterable[Line], by_label: bool = False) -> None:
    """Raise UserError if an image is listed twice, or with `by_label`, listed twice with the same label."""
    seen: dict[tuple[str, int | None], str] = {}
    for line in lines:
        key = line.path, line.label if by_label else None
        if key in seen:
            raise UserError(
                f"{line.where}: names `{line.path}` again, after {seen[key]}; "
                "an image must be listed once, in train or in test."
            )
        seen[key] = line.where


def label_within(line: Line, most: int, first: int = 0) -> int:
    """Return the label, counted from 0, or raise UserError unless it is within first..first+most-1."""
    if line.label is None or not first <= line.label < first + most:
        raise UserError(f"{line.where}: a label must be within {first}..{first + most - 1}, but it is {line.label}.")
    return line.label - first
