"""List files: one image a line, with or without its label."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath

from fedsweep.common.errors import UserError, near
from fedsweep.common.yaml_values import read_text
from fedsweep.preparation.layouts.disk_listing import list_folder


@dataclass(frozen=True)
class Line:
    """A line of a list file: its place for error messages, the image's path, and its label if it has one."""

    where: str
    path: str
    label: int | None


def read_lines(root: Path, name: str) -> Iterator[tuple[str, str]]:
    """Yield the place and the text of each line that is not blank: ("splits/real_train.txt, line 3", "...")."""
    # Not splitlines(), which also cuts at separators that a file name may hold.
    for number, line in enumerate(read_text(root / name, "utf-8-sig").split("\n"), start=1):
        if line.strip():
            yield f"{root / name}, line {number}", line.strip()


def read_list(root: Path, name: str, labels: bool = True) -> list[Line]:
    """Return the lines `<path of an image> <label>`, or raise UserError for a malformed line or a path out of the root.

    Without `labels`, lines may lack a label.
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


class ExistingFiles:
    """The files under a root. Listing each folder once is faster than a query for every file."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._names = cache(
            lambda folder: frozenset(list_folder(root / folder).files) if (root / folder).is_dir() else None
        )

    def __contains__(self, path: str) -> bool:
        folder, _, name = path.rpartition("/")
        return name in (self._names(folder) or ())

    def require(self, path: str, where: str) -> None:
        """Raise UserError, with near names, if `path`, which a list names at `where`, does not exist."""
        if path in self:
            return
        folder, _, name = path.rpartition("/")
        names = self._names(folder)
        why = near(name, sorted(names)) or "." if names is not None else f": there is no folder `{folder}`."
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
