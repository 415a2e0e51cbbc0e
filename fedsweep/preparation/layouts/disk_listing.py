"""Functions that list folders in sorted order, and the error for a data set without the expected layout."""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from fedsweep.common.errors import UserError, summarise_list
from fedsweep.common.paths import data_folder

IMAGE_SUFFIXES = frozenset(
    {
        ".bmp",
        ".gif",
        ".jpeg",
        ".jpg",
        ".pgm",
        ".png",
        ".ppm",
        ".tif",
        ".tiff",
        ".webp",
    }  # also in upper case, e.g. .JPEG
)
UNREAD_SUFFIXES = frozenset(
    {".avif", ".dng", ".heic", ".heif", ".ico", ".jfif", ".jp2", ".jpe", ".jxl", ".npy", ".psd", ".svg", ".tga"}
)
"""Suffixes of image files that no layout reads."""
BROKEN = "is a broken link or not a regular file"
_NOT_DATA = "__MACOSX"  # the resource forks that macOS puts into archives


@dataclass(frozen=True)
class Folder:
    """The sorted names of the folders and files in a folder.

    Hidden files and folders, `__MACOSX` and fedsweep's data folder are left out.
    """

    path: Path
    folders: tuple[str, ...]
    files: tuple[str, ...]
    broken: tuple[str, ...] = ()  # images that are broken links or not regular files

    @property
    def images(self) -> tuple[str, ...]:
        """The names of the files with an image suffix, such as `.jpg`."""
        return tuple(name for name in self.files if is_image(name))

    def inner(self) -> Iterator["Folder"]:
        """Yield the listing of each subfolder."""
        for name in self.folders:
            yield list_folder(self.path / name)


def is_image(name: str) -> bool:
    """Return whether a file name has an image suffix, such as `.jpg`.

    >>> is_image("a.b.JPEG"), is_image("labels.txt")
    (True, False)
    """
    return os.path.splitext(name)[1].lower() in IMAGE_SUFFIXES


def has_unread_format(name: str) -> bool:
    """Return whether a file name has the suffix of an image format that no layout reads, such as `.heic`."""
    return os.path.splitext(name)[1].lower() in UNREAD_SUFFIXES


def list_folder(path: Path | str) -> Folder:
    """Return the names of the folders and files in a folder.

    Raise UserError if the folder cannot be read, or if it contains an image that is a broken link or not a regular
    file.
    """
    found = scan(path)
    if found.broken:
        raise UserError(f"`{found.path / found.broken[0]}` {BROKEN}.")
    return found


def scan(path: Path | str) -> Folder:
    """Return the names of the folders and files in a folder.

    Unlike `list_folder`, accept images that are broken links or not regular files. Raise UserError if the folder cannot
    be read. Files are not queried one by one, because a folder may contain millions of files.
    """
    folders, files, broken, stores = [], [], [], data_folder()
    try:
        with os.scandir(path) as entries:
            for entry in entries:
                if entry.name.startswith(".") or entry.name == _NOT_DATA:
                    continue
                if entry.is_dir():
                    if entry.name != stores.name or not (stores.exists() and os.path.samefile(entry, stores)):
                        folders.append(entry.name)
                elif entry.is_file():
                    files.append(entry.name)
                elif is_image(entry.name):
                    broken.append(entry.name)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}.") from None
    return Folder(Path(path), tuple(sorted(folders)), tuple(sorted(files)), tuple(sorted(broken)))


def fold(name: str) -> str:
    """Return a name in lower case, without spaces, hyphens or underscores.

    >>> fold("Real_World")
    'realworld'
    """
    return name.casefold().replace("_", "").replace("-", "").replace(" ", "")


def join(*parts: str) -> str:
    """Join the parts of a path within the root; an empty part means the root itself.

    >>> join("", "real", "bus"), join("", "")
    ('real/bus', '')
    """
    return "/".join(part for part in parts if part)


def only_folder(root: Path, what: str, fits: Callable[[Folder], bool], levels: int = 2) -> str | None:
    """Search for the only folder that satisfies `fits`, and return its path relative to the root.

    The search starts with the root itself and continues level by level, at most `levels` levels below the root. It ends
    at the first level on which a folder satisfies `fits`. Return None if no folder satisfies `fits`. Raise UserError if
    several folders on the same level satisfy `fits`. In the error message, `what` names the contents of the folder,
    e.g. "the lists".
    """
    level = [""]
    for _ in range(levels + 1):
        found = [name for name in level if fits(list_folder(root / name))]
        if len(found) > 1:
            raise UserError(f"{root}: {what} must be in one folder, but they are in {summarise_list(found)}.")
        if found:
            return found[0]
        level = [join(name, folder) for name in level for folder in list_folder(root / name).folders]
    return None


def unexpected(root: Path, layout: str, looked_for: str) -> UserError:
    """Return the error for a root folder that does not have the layout `layout`.

    The message lists the files and folders in the root. `looked_for` describes the files and folders that the layout
    expects.
    """
    folder = list_folder(root)
    kinds = (("folders", folder.folders), ("files", folder.files))
    found = " and ".join(f"{kind} {summarise_list(names)}" for kind, names in kinds if names) or "nothing"
    deeper = sorted(path.parent for path in root.glob("*/*.parquet"))  # as Hugging Face's repositories have them
    hint = "."
    if deeper:
        hint = f"; there are Parquet files one folder below, so try `--root {deeper[0]}`."
    elif len(folder.folders) == 1:  # many archives contain a single folder
        hint = f"; the data set may be one folder below, so try `--root {root / folder.folders[0]}`."
    problem = f"looked for {looked_for}, but found {found}"
    return UserError(f"the root {root} does not have the layout `{layout}`: {problem}{hint}")
