"""From images found to a listing: the rules that every layout shares."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedsweep.common.errors import UserError
from fedsweep.preparation.layouts.base import Item, Listing, Split
from fedsweep.preparation.layouts.disk_listing import Line, join, look, some

_LONGEST_NAME = 200  # bytes; file systems take 255, and the store adds a suffix


@dataclass(frozen=True)
class Found:
    """An image, its class still by name."""

    path: str
    class_name: str
    domain: str
    split: Split | None = None


@dataclass(frozen=True)
class Tree:
    """The images of a tree of folders, and the names of its class folders, the empty ones too."""

    class_names: tuple[str, ...]
    found: tuple[Found, ...]

    def items(self) -> list[Item]:
        """The images with labels that count from 0 in the order of the classes' names."""
        labels = {name: label for label, name in enumerate(self.class_names)}
        return [Item(one.path, labels[one.class_name], one.domain, one.split) for one in self.found]


def tree(root: Path, places: Iterable[tuple[str, str, Split | None]]) -> Tree:
    """The images at `<folder>/<class>/<image>` for each place (domain, folder within the root, split).

    Raises:
        UserError: an image lies elsewhere in the folder, or a domain has none.
    """
    names: set[str] = set()
    found: list[Found] = []
    for domain, folder, split in places:
        before = len(found)
        there = look(root / folder)
        if folder and there.images:  # a picture in the root itself may well be a preview
            raise UserError(
                f"{root / folder}: images must lie in a class folder, but `{there.images[0]}` lies beside them."
            )
        for class_name in there.folders:
            inside = look(root / folder / class_name)
            if inside.folders:
                raise UserError(
                    f"{root / folder / class_name}: images must lie in the class folder itself, "
                    f"but it holds the folders {some(inside.folders)}."
                )
            names.add(class_name)
            found += [Found(join(folder, class_name, image), class_name, domain, split) for image in inside.images]
        if len(found) == before:
            raise UserError(f"the domain `{domain}` is empty: no images under {root / folder}/<class>/.")
    return Tree(tuple(sorted(names)), tuple(found))


def names_from_lists(lines: Sequence[Line], most: int) -> list[str | None]:
    """The class of each label, read from the folders that the listed images lie in; None where a label has none.

    Raises:
        UserError: a label is not within 0..most-1, has two names, or shares its name with another.
    """
    by_label: dict[int, tuple[str, str]] = {}
    by_name: dict[str, tuple[int, str]] = {}
    for line in lines:
        label = label_within(line, most)
        name = line.path.split("/")[-2] if "/" in line.path else ""
        if not name:
            raise UserError(f"{line.where}: an image must lie in a class folder, but the path is `{line.path}`.")
        known, place = by_label.setdefault(label, (name, line.where))
        if known != name:
            raise UserError(f"{line.where}: label {label} is class `{name}` here, but `{known}` in {place}.")
        other, place = by_name.setdefault(name, (label, line.where))
        if other != label:
            raise UserError(f"{line.where}: class `{name}` has label {label} here, but {other} in {place}.")
    return [by_label[label][0] if label in by_label else None for label in range(max(by_label) + 1)]


def label_within(line: Line, most: int, first: int = 0) -> int:
    """The line's label, counted from 0.

    Raises:
        UserError: it is not within first..first+most-1.
    """
    if line.label is None or not first <= line.label < first + most:
        raise UserError(f"{line.where}: a label must be within {first}..{first + most - 1}, but it is {line.label}.")
    return line.label - first


def listing(
    root: Path,
    class_names: Sequence[str | None],
    items: Iterable[Item],
    num_classes: int | None = None,
    known: Iterable[str] = (),
) -> Listing:
    """The images of the first classes, sorted by domain and then by path, once all rules hold.

    Args:
        root: Named in errors.
        class_names: By label; None for a label that has no image, which is legal behind the first `num_classes`.
        items: All images.
        num_classes: Of the first classes; None for all.
        known: The domains that the data set has as its authors ship it.

    Raises:
        UserError: there are not so many classes; one of them, or a domain, is empty; a domain cannot name a file.
    """
    items = list(items)
    count = len(class_names) if num_classes is None else num_classes
    if not 1 <= count <= len(class_names):
        raise UserError(f"`--classes` must be within 1..{len(class_names)}, the classes of {root}, but it is {count}.")
    kept = [item for item in items if item.label < count]
    used = {item.label for item in kept}
    empty = [class_names[label] or f"label {label}" for label in range(count) if label not in used]
    if empty:
        raise UserError(f"{root}: a class must have images, but {some(empty)} {_has(empty)} none in any domain.")
    domains = sorted({item.domain for item in kept})
    lost = sorted({item.domain for item in items} - set(domains))
    if lost:
        raise UserError(f"{root}: a domain must have images, but {some(lost)} {_has(lost)} none of {count} classes.")
    check_domains(root, domains)
    for item in kept:
        if not item.path.isascii():
            _check_text(root, item.path)
    kept.sort(key=lambda item: (item.domain, item.path, item.label))
    absent = tuple(sorted(set(known) - set(domains)))
    return Listing(tuple(name or "" for name in class_names[:count]), tuple(domains), tuple(kept), absent)


def check_domains(root: Path, domains: Sequence[str]) -> None:
    """Refuses names of domains that cannot name the store's files.

    Raises:
        UserError: a name is empty, hidden, too long, has a separator or control character, or differs from another
            in case only.
    """
    for domain in domains:
        _check_text(root, domain)
        if not domain or domain.startswith(".") or not domain.isprintable() or set(domain) & {"/", "\\"}:
            rule = "must be printable, without `/` and `\\` and a leading dot"
            raise UserError(f"{root}: a domain names a file: it {rule}, but it is {domain!r}.")
        if len(domain.encode()) > _LONGEST_NAME:
            raise UserError(
                f"{root}: a domain names a file: it must have at most {_LONGEST_NAME} bytes, but it is {domain!r}."
            )
    folded: dict[str, str] = {}
    for domain in domains:
        other = folded.setdefault(domain.casefold(), domain)
        if other != domain:
            raise UserError(f"{root}: the domains `{other}` and `{domain}` must differ in more than case.")


def _check_text(root: Path, name: str) -> None:
    try:
        name.encode()
    except UnicodeEncodeError:  # bytes of a file name that are not UTF-8
        raise UserError(f"{root}: names must be UTF-8, but one is {name!r}.") from None


def _has(names: Sequence[str]) -> str:
    return "has" if len(names) == 1 else "have"
