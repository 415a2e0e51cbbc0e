"""Lists `<domain>_train.txt` and `<domain>_test.txt`, which DomainNet and NICO++ ship."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from fedsweep.common.errors import UserError
from fedsweep.preparation.layouts.base import Item, Listing, Split
from fedsweep.preparation.layouts.disk_listing import (
    Line,
    Present,
    first_folder,
    join,
    look,
    read_list,
    refuse_twice,
)
from fedsweep.preparation.layouts.layout_rules import label_within, listing, names_from_lists

_TRAIN, _TEST = "_train.txt", "_test.txt"


def find_lists(root: Path, places: Iterable[str], known: frozenset[str] | None = None) -> dict[str, dict[Split, str]]:
    """The lists of each domain, from the first place that has any; empty if none has.

    Args:
        root: The root.
        places: Folders within it, in the order of preference.
        known: The data set's domains, where other files could end on `_train.txt`.

    Raises:
        UserError: a domain has one list of the two.
    """

    def domains(names: Iterable[str], suffix: str) -> set[str]:
        stems = {name.removesuffix(suffix) for name in names if name.endswith(suffix)}
        return stems if known is None else stems & known

    place = first_folder(root, places, lambda there: bool(domains(there.files, _TRAIN)))
    if place is None:
        return {}
    files = look(root / place).files
    train, test = domains(files, _TRAIN), domains(files, _TEST)
    for domain in sorted(train ^ test):
        there, missing = (_TRAIN, _TEST) if domain in train else (_TEST, _TRAIN)
        raise UserError(f"{root / place} has the list `{domain}{there}`, but not `{domain}{missing}`.")
    return {
        domain: {"train": join(place, domain + _TRAIN), "test": join(place, domain + _TEST)} for domain in sorted(train)
    }


def list_domains(
    root: Path,
    lists: Mapping[str, Mapping[Split, str]],
    bases: Sequence[str],
    most: int,
    known: Iterable[str],
    count: int | None,
    default: int | None,
) -> Listing:
    """The images that the lists name.

    Args:
        root: The root.
        lists: As `find_lists` gives them; those of domains that have no folder are left out.
        bases: Folders within the root that the lists' paths may start from; the first that has the first image is it.
        most: Labels must be below it.
        known: The domains that the data set has as its authors ship it.
        count: The first classes asked for, None if not.
        default: The first classes taken if none are asked for, at most those there are; None for all.

    Raises:
        UserError: a line is wrong, an image is not there or listed twice, a class or domain is empty.
    """
    there = {domain for domain in lists if any((root / base / domain).is_dir() for base in bases)}
    read: list[tuple[Line, str, Split]] = []
    for domain, of_domain in lists.items():
        if there and domain not in there:  # where none is, the first line says what is missing
            continue
        for split, name in of_domain.items():
            read += [(line, domain, split) for line in read_list(root, name)]
    lines = [line for line, _, _ in read]
    refuse_twice(lines)
    names = names_from_lists(lines, most)
    if count is None and default is not None:
        count = min(default, len(names))
    present = Present(root)
    base = next((base for base in bases if join(base, lines[0].path) in present), "")
    items = []
    for line, domain, split in read:
        path = join(base, line.path)
        # Those of classes that are not asked for may have been left packed.
        if count is None or label_within(line, most) < count:
            present.require(path, line.where)
        items.append(Item(path, label_within(line, most), domain, split))
    return listing(root, names, items, count, {*known, *lists})
