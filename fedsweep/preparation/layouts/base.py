"""The base class of layouts, and functions that layouts share, such as readers of text files that list images.

A layout is a way in which published data sets arrange their image files. For each layout, a class lists and reads the
images of a data set.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path, PurePosixPath
from typing import ClassVar, Literal

from fedsweep.common.errors import UserError, near, summarise_list
from fedsweep.common.yaml_values import read_text
from fedsweep.preparation.layouts.disk_listing import (
    Folder,
    has_unread_format,
    join,
    list_folder,
    unexpected,
)

Split = Literal["train", "test"]
BOTH: tuple[Split, Split] = ("train", "test")
ListedSplit = Literal["train", "validation", "test"]  # the splits of published data sets
_LONGEST_NAME = 200  # bytes; file systems allow 255, and a prepared data set adds a suffix


@dataclass(frozen=True)
class Item:
    """One image of a data set.

    `path` identifies the image within the root folder. `split` is None if the layout does not define splits. Images
    with the same `group` show the same thing, such as a video; it is None if the layout does not define groups.
    `validation` is true for test images that the data set lists for validation.
    """

    path: str
    label: int
    domain: str
    split: Split | None
    group: str | None = None
    validation: bool = False


def side(split: ListedSplit | None) -> Split | None:
    """Return the prepared split of the images that a data set lists in `split`: validation images are test images."""
    return "test" if split == "validation" else split


@dataclass(frozen=True)
class Listing:
    """All images of a data set.

    Label i stands for the class `class_names[i]`. Every domain and every class has at least one image.

    `Layout._find` returns a preliminary listing, in which domains and classes may have no images. In a preliminary
    listing, `domains` contains all domains of the published data set. If the name of a class is unknown because the
    class has no images, `class_names` contains "" for the class.
    """

    class_names: tuple[str, ...]
    domains: tuple[str, ...]
    items: tuple[Item, ...]
    absent: tuple[str, ...] = ()  # domains of the published data set that are missing in the root
    empty: tuple[str, ...] = ()  # class folders without images
    unread: tuple[str, ...] = ()  # image files in class folders whose format is not supported
    nameless: bool = False  # True if the layout has no domains, so that the only domain is named after the root


class Layout(ABC):
    """The base class of layouts, which list the images in a root folder and read their encoded bytes."""

    name: ClassVar[str]  # the value of `fedsweep data prepare --layout`
    looks_like: ClassVar[str]  # the layout in one line, e.g. `<domain>/<class>/*.jpg, splits/<domain>_{train,test}.txt`
    num_classes: ClassVar[int | None] = None  # default of `list`: the number of classes to read; None for all

    def list(self, root: Path, num_classes: int | None = None) -> Listing:
        """Return the images of the first `num_classes` classes, sorted by domain and then by path.

        If `num_classes` is None, the default of the layout applies. Most layouts list all classes by default.

        Raises:
            UserError: The files in `root` do not have this layout, there are fewer than `num_classes` classes, or a
                class or a domain has no images.
        """
        found = self._find(root, self.num_classes if num_classes is None else num_classes)
        names = found.class_names
        count = num_classes if num_classes is not None else min(self.num_classes or len(names), len(names))
        if not 1 <= count <= len(names):
            raise UserError(
                f"`--classes` must be between 1 and {len(names)}, the number of classes in {root}, but it is {count}."
            )
        kept = [item for item in found.items if item.label < count]
        used = {item.label for item in kept}
        if empty := [names[label] or f"label {label}" for label in range(count) if label not in used]:
            raise UserError(f"{root}: a class must have images, but {_have(empty)} none in any domain.")
        domains = sorted({item.domain for item in kept})
        if lost := sorted({item.domain for item in found.items}.difference(domains)):
            raise UserError(
                f"{root}: a domain must have images in the first {count} of {len(names)} classes, "
                f"but {_have(lost)} none."
            )
        check_domains(root, domains)
        for item in kept:
            if not item.path.isascii():
                _check_text(root, item.path)
        kept.sort(key=lambda item: (item.domain, self._order(item.path), item.label))
        absent = tuple(sorted({*found.domains}.difference(domains)))
        return replace(found, class_names=names[:count], domains=tuple(domains), items=tuple(kept), absent=absent)

    @abstractmethod
    def _find(self, root: Path, num_classes: int | None) -> Listing:
        """Return a preliminary listing of the images (see `Listing`).

        The listing must contain all images of the first `num_classes` classes, or of all classes if `num_classes` is
        None. If one of their files is missing, an implementation must raise UserError. Images of other classes may be
        left out of the listing, and their files may be missing.
        """

    def _order(self, path: str) -> tuple[str, int]:
        """Return the key by which the image at `path` is sorted within its domain."""
        return path, 0

    def _folder(self, root: Path, candidates: Iterable[str], fits: Callable[[Folder], bool], looked_for: str) -> str:
        """Return the first of the `candidates` that is a folder in `root` and satisfies `fits`.

        Raise UserError if there is no such folder. `looked_for` describes the folder in the error message.
        """
        for name in candidates:
            if (root / name).is_dir() and fits(list_folder(root / name)):
                return name
        raise unexpected(root, self.name, looked_for)

    def files(self, items: Iterable[Item]) -> Sequence[str]:
        """Return the paths, relative to the root, of the files that contain the images `items`.

        By default, each image is in a file of its own.
        """
        return [*dict.fromkeys(item.path for item in items)]

    def read(self, root: Path, items: Sequence[Item]) -> Iterator[bytes]:
        """Yield the encoded bytes of each image in `items`, in order."""
        for item in items:
            yield (root / item.path).read_bytes()


def tree(root: Path, places: Iterable[tuple[str, str, ListedSplit | None]], domains: tuple[str, ...] = ()) -> Listing:
    """Return a listing of the images that are stored as `<folder>/<class>/<image>`.

    Classes are labelled in alphabetical order. Classes whose folders contain no image are left out.

    Args:
        root: The folder of the data set.
        places: The domain, the path (relative to the root) and the split of each folder that contains class folders.
        domains: All domains of the published data set, even if some are missing in `root`; empty if unknown.

    Raises:
        UserError: An image is not directly in a class folder, or a domain has no images.
    """
    names: set[str] = set()
    images: list[tuple[str, str, str, ListedSplit | None]] = []
    empty, unread = list[str](), list[str]()
    for domain, folder, split in places:
        before = len(images)
        outer = list_folder(root / folder)
        if folder and outer.images:  # an image in the root itself may be a preview of the data set
            raise UserError(f"{outer.path}: images must be in class folders, but `{outer.images[0]}` is not.")
        for inner in outer.inner():
            if inner.folders:
                raise UserError(
                    f"{inner.path}: images must be directly in the class folder, "
                    f"but it contains the folders {summarise_list(inner.folders)}."
                )
            name = inner.path.name
            names |= {name} if inner.images else set()
            images += [(join(folder, name, image), name, domain, split) for image in inner.images]
            empty += [] if inner.images else [join(folder, name)]
            unread += [join(folder, name, one) for one in inner.files if has_unread_format(one)]
        if len(images) == before:
            raise UserError(f"the domain `{domain}` is empty: there are no images in {outer.path}/<class>/.")
    labels = {name: label for label, name in enumerate(sorted(names))}
    items = (
        Item(path, labels[name], domain, side(split), validation=split == "validation")
        for path, name, domain, split in images
    )
    return Listing(tuple(labels), domains, tuple(items), empty=tuple(empty), unread=tuple(unread))


def check_domains(root: Path, domains: Sequence[str]) -> None:
    """Raise UserError if a domain's name cannot be a file name, or differs from another domain's name only in case."""
    folded: dict[str, str] = {}
    for domain in domains:
        _check_text(root, domain)
        if not domain or domain.startswith(".") or not domain.isprintable() or set(domain) & {"/", "\\"}:
            rule = "must be printable, contain no `/` or `\\` and not begin with a dot"
            raise UserError(f"{root}: the name of a domain {rule}, but it is {domain!r}.")
        if len(domain.encode()) > _LONGEST_NAME:
            raise UserError(
                f"{root}: the name of a domain must have at most {_LONGEST_NAME} bytes, but it is {domain!r}."
            )
        if (other := folded.setdefault(domain.casefold(), domain)) != domain:
            raise UserError(f"{root}: the domains `{other}` and `{domain}` must differ in more than case.")


def _check_text(root: Path, name: str) -> None:
    try:
        name.encode()
    except UnicodeEncodeError:  # bytes of a file name that are not UTF-8
        raise UserError(f"{root}: names must be encoded in UTF-8, but {name!r} is not.") from None


def _have(names: Sequence[str]) -> str:
    return f"{summarise_list(names)} {'has' if len(names) == 1 else 'have'}"


@dataclass(frozen=True)
class Line:
    """A line of a list file: the path and the label of an image.

    `where` is the location of the line, for error messages. `domain` and `split` apply to all images in the list file.
    """

    where: str
    path: str
    label: int | None
    domain: str
    split: Split | None


def read_lines(root: Path, name: str) -> Iterator[tuple[str, str]]:
    """Yield the location (for error messages) and the text of each non-blank line in the file `name`."""
    # Not splitlines(), which also splits at characters that a file name may contain.
    for number, line in enumerate(read_text(root / name, "utf-8-sig").split("\n"), start=1):
        if line.strip():
            yield f"{root / name}, line {number}", line.strip()


def read_list(root: Path, name: str, domain: str, split: Split | None, labels: bool = True) -> list[Line]:
    """Return the lines of a list file.

    Each line contains the path of an image and, in most data sets, a label.

    Args:
        root: The folder of the data set.
        name: The path of the list file, relative to the root.
        domain: The domain of all images in the list.
        split: The split of all images in the list.
        labels: Whether a line without a label is an error.

    Raises:
        UserError: The list is empty, a line is malformed, or a path leads out of the root.
    """
    lines = []
    for where, text in read_lines(root, name):
        # Split at the last space: names of NICO++'s classes contain spaces ("hot air balloon").
        path, _, last = text.rpartition(" ")
        is_label = last.removeprefix("-").isdecimal() and last.isascii() and bool(path.strip())
        if labels and not is_label:
            raise UserError(f"{where}: a line must be `<path of an image> <label>`, but it is `{text}`.")
        path = (path.strip() if is_label else text).replace("\\", "/")
        parts = PurePosixPath(path).parts
        if not parts or parts[0] == "/" or ".." in parts:
            raise UserError(f"{where}: a path must not lead out of the root, but it is `{path}`.")
        lines.append(Line(where, "/".join(parts), int(last) if is_label else None, domain, split))
    if not lines:
        raise UserError(f"the list {root / name} is empty.")
    return lines


class ExistingFiles:
    """An object that checks whether files exist in a root folder.

    Each folder is listed only once, which is faster than looking up each file.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._names = cache(
            lambda folder: frozenset(list_folder(root / folder).files) if (root / folder).is_dir() else None
        )

    def require(self, path: str, where: str) -> None:
        """Raise UserError if the file `path` does not exist; the error message suggests similar file names.

        `where` is the location of the line that lists the file.
        """
        folder, _, name = path.rpartition("/")
        names = self._names(folder)
        if names is None or name not in names:
            why = f": there is no folder `{folder}`." if names is None else near(name, sorted(names)) or "."
            raise UserError(f"{where}: there is no file `{path}` in {self._root}{why}")


def refuse_twice(lines: Iterable[Line], by_label: bool = False) -> None:
    """Raise UserError if an image is listed more than once.

    If `by_label` is true, an image may be listed several times with different labels.
    """
    seen: dict[tuple[str, int | None], str] = {}
    for line in lines:
        key = line.path, line.label if by_label else None
        if key in seen:
            raise UserError(
                f"{line.where}: `{line.path}` is listed again, after {seen[key]}; "
                "an image must be listed only once, in train or in test."
            )
        seen[key] = line.where


def label_within(line: Line, most: int, first: int = 0) -> int:
    """Return the label of a line of a list file as a number from 0 to `most` - 1.

    In the file, the `most` classes are numbered from `first`. Raise UserError if the label is missing or out of range.
    """
    if line.label is None or not first <= line.label < first + most:
        last = first + most - 1
        raise UserError(f"{line.where}: a label must be between {first} and {last}, but it is {line.label}.")
    return line.label - first
