"""What all sources do with a disk: listing folders in sorted order, reading list files, saying what was found."""

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath

from fedsweep.common.errors import UserError, near
from fedsweep.common.paths import data_folder

IMAGE_SUFFIXES = frozenset(
    {".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"}  # in any case: .JPEG
)
BROKEN = "is a link to nothing, or no regular file"
_NOT_DATA = "__MACOSX"  # the resource forks that macOS puts into archives


@dataclass(frozen=True)
class Folder:
    """The names in a folder, sorted; links are followed.

    Left out are hidden ones, `__MACOSX` and fedsweep's own data folder, which lies in the root with `--root .`.
    """

    folders: tuple[str, ...]
    files: tuple[str, ...]
    broken: tuple[str, ...] = ()
    """Images that are links to nothing, or no regular files; in none of the above."""

    @property
    def images(self) -> tuple[str, ...]:
        """The files that are images by their suffix."""
        return tuple(name for name in self.files if is_image(name))


def is_image(name: str) -> bool:
    """Whether a file's suffix is that of an image.

    >>> is_image("a.b.JPEG"), is_image("labels.txt")
    (True, False)
    """
    return os.path.splitext(name)[1].lower() in IMAGE_SUFFIXES


def look(path: Path | str) -> Folder:
    """The folder's names.

    Raises:
        UserError: the folder cannot be read, or an image in it is a link to nothing.
    """
    seen = scan(path)
    if seen.broken:
        raise UserError(f"`{Path(path) / seen.broken[0]}` {BROKEN}.")
    return seen


def scan(path: Path | str) -> Folder:
    """The folder's names, by one pass over it that asks for no file's status (millions of files are listed so).

    Raises:
        UserError: the folder cannot be read.
    """
    folders, files, broken, stores = [], [], [], data_folder()
    try:
        with os.scandir(path) as entries:
            for entry in entries:
                if entry.name.startswith(".") or entry.name == _NOT_DATA:
                    continue
                if entry.is_dir():
                    if entry.name != stores.name or not _is_one(entry, stores):
                        folders.append(entry.name)
                elif entry.is_file():
                    files.append(entry.name)
                elif is_image(entry.name):
                    broken.append(entry.name)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}.") from None
    return Folder(tuple(sorted(folders)), tuple(sorted(files)), tuple(sorted(broken)))


def _is_one(entry: os.DirEntry[str], folder: Path) -> bool:
    return folder.exists() and os.path.samefile(entry, folder)


def look_at_root(root: Path) -> Folder:
    """The root's names.

    Raises:
        UserError: there is no such folder.
    """
    if not root.exists():
        raise UserError(f"the root {root} does not exist.")
    if not root.is_dir():
        raise UserError(f"the root {root} must be a folder, but it is a file.")
    return look(root)


def join(*parts: str) -> str:
    """Parts of a path within the root; empty ones stand for the root itself.

    >>> join("", "real", "bus"), join("", "")
    ('real/bus', '')
    """
    return "/".join(part for part in parts if part)


def first_folder(root: Path, candidates: Iterable[str], fits: Callable[[Folder], bool]) -> str | None:
    """The first of the folders within the root that is there and fits; None if there is none."""
    return next((name for name in candidates if (root / name).is_dir() and fits(look(root / name))), None)


def only_folder(root: Path, what: str, fits: Callable[[Folder], bool], levels: int = 2) -> str | None:
    """The folder within the root that fits: the root itself, or one up to `levels` below it; None if there is none.

    Raises:
        UserError: two fit on the uppermost level where any does; `what` says what is in them.
    """
    level = [""]
    for _ in range(levels + 1):
        found = [name for name in level if fits(look(root / name))]
        if len(found) > 1:
            raise UserError(f"{root}: {what} must lie in one folder, but they lie in {some(found)}.")
        if found:
            return found[0]
        level = [join(name, folder) for name in level for folder in look(root / name).folders]
    return None


def some(names: Iterable[str], most: int = 5) -> str:
    """The first few names in backquotes.

    >>> some(["a", "b", "c"], most=2)
    '`a`, `b` and 1 more'
    """
    names = list(names)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(f"`{name}`" for name in names[:most]) + more


def unexpected(root: Path, layout: str, looked_for: str) -> UserError:
    """The sentence for a root of another layout: what was looked for, what was found."""
    there = look_at_root(root)
    kinds = [f"{kind} {some(names)}" for kind, names in (("folders", there.folders), ("files", there.files)) if names]
    found = " and ".join(kinds) if kinds else "nothing"
    deeper = sorted(path.parent for path in root.glob("*/*.parquet"))  # as Hugging Face's repositories have them
    hint = "."
    if deeper:
        hint = f"; Parquet files lie one folder down: `--root {deeper[0]}`."
    elif len(there.folders) == 1:  # as archives unpack
        hint = f"; perhaps all lies one folder down: `--root {root / there.folders[0]}`."
    return UserError(f"the root {root} has not the layout `{layout}`: looked for {looked_for}, but found {found}{hint}")


@dataclass(frozen=True)
class Line:
    """A line of a list file: the image's path, its label where it has one, and where the line stands."""

    where: str
    path: str
    label: int | None


def read_lines(root: Path, name: str) -> Iterator[tuple[str, str]]:
    """Each line that is not blank, after where it stands: ("splits/real_train.txt, line 3", "...").

    Raises:
        UserError: the file cannot be read, or is not UTF-8 text.
    """
    try:
        text = (root / name).read_text("utf-8-sig")
    except OSError as error:
        raise UserError(f"{root / name} cannot be read: {error.strerror or error}.") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{root / name} cannot be read: it is not UTF-8 text (byte {error.start}).") from None
    # Not splitlines(), which also cuts at separators that a file name may hold.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield f"{root / name}, line {number}", line.strip()


def read_list(root: Path, name: str, labels: bool = True) -> list[Line]:
    """The lines `<path of an image> <label>` of a list; without `labels`, a line may lack one.

    Raises:
        UserError: a line is not of that form, or its path leads out of the root.
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
        lines.append(Line(where, "/".join(parts), int(last) if is_label else None))
    if not lines:
        raise UserError(f"the list {root / name} is empty.")
    return lines


class Present:
    """Which files there are under a root; each folder is listed once, which beats asking for every file."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._names = cache(lambda folder: frozenset(look(root / folder).files) if (root / folder).is_dir() else None)

    def __contains__(self, path: str) -> bool:
        folder, _, name = path.rpartition("/")
        return name in (self._names(folder) or ())

    def require(self, path: str, where: str) -> None:
        """Refuses a path that a list names and that is not there.

        Raises:
            UserError: it is not there; near names are said.
        """
        if path in self:
            return
        folder, _, name = path.rpartition("/")
        there = self._names(folder)
        why = near(name, sorted(there)) or "." if there is not None else f": there is no folder `{folder}`."
        raise UserError(f"{where}: names `{path}`, which is not under {self._root}{why}")


def refuse_twice(lines: Iterable[Line], by_label: bool = False) -> None:
    """Refuses an image that is listed twice, be it in one list or in two; with `by_label`, twice with one label.

    Raises:
        UserError: with both places.
    """
    seen: dict[tuple[str, int | None], str] = {}
    for line in lines:
        key = line.path, line.label if by_label else None
        if key in seen:
            raise UserError(
                f"{line.where}: names `{line.path}` again, after {seen[key]}; "
                "an image must be listed once, in train or in test."
            )
        seen[key] = line.where
