"""Warnings about images and folders that can be prepared, but probably not as intended."""

import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence, Set

from fedsweep.common.errors import UserError, summarise_list
from fedsweep.data.prepared.card import COPIES, CopiesCard
from fedsweep.preparation.plan import Plan

SHOWN = 3  # a warning names at most this many files or classes


def plan_warnings(plan: Plan) -> list[str]:
    """Return one warning for each kind of problem that the plan of a preparation has.

    The kinds are class names that are nearly equal, empty class folders, image files in unsupported formats, and
    classes without training or test images.
    """
    warnings = [
        *_similar_classes(plan.listing.class_names),
        *_empty_folders(plan.listing.empty),
        *_left_out(plan.listing.unread),
    ]
    for split, found in _one_sided(plan, frozenset()).items():
        warnings += _without_images(split, [f"{name} ({count})" for name, count in found.items()])
    return warnings


def blank_warning(paths: Sequence[str]) -> list[str]:
    """Return a warning about decoded images that are nearly black or of one colour; empty if there are none."""
    if not paths:
        return []
    return [
        f"{_count(len(paths), 'image is', 'images are')} nearly black or of one colour: {summarise_list(paths, SHOWN)}"
        "; 16-bit values are divided by 256, so images that use fewer bits must be rescaled first"
    ]


def copies_warnings(found: CopiesCard | None) -> list[str]:
    """Return warnings about images of identical pixels, and about the effects of groups of images on the split.

    The effects are groups on both sides of the split, and classes that have images on only one side because all images
    of a group are on the same side. Nothing is known about data sets that an older version prepared.
    """
    if found is None:
        return []
    warnings = []
    if found.groups:
        have = _count(found.groups, "group of images has", "groups of images have")
        classes = f", {found.other_classes} of them in different classes" if found.other_classes else ""
        same = " = ".join(found.example[:SHOWN])
        warnings.append(
            f"{have} identical pixels{classes}, e.g. {same}; each group is kept together, and `{COPIES}` in the "
            "folder of the data set lists all groups"
        )
    if found.both_splits:
        have = _count(
            found.both_splits, "group of copies or related images has", "groups of copies or related images have"
        )
        warnings.append(
            f"{have} both training and test images, because the split of the data set is kept or all images of a "
            "domain are copies; the accuracy on such test images is too high"
        )
    if found.both_tests:
        have = _count(
            found.both_tests, "group of copies or related images has", "groups of copies or related images have"
        )
        warnings.append(
            f"{have} both images that are listed for validation and other test images, because the split of the data "
            "set is kept; with `data.validation_fraction` listed, a search chooses by images that are related to test "
            "images"
        )
    for split, lost in (("test", found.without_test), ("training", found.without_training)):
        classes_of = [f"`{name}` of `{domain}`" for domain, names in lost.items() for name in names]
        reason = ", because each group of copies or related images is on one side of the split"
        warnings += _without_images(split, classes_of, reason)
    return warnings


def corrupt_warnings(plan: Plan, corrupt: Set[str]) -> list[str]:
    """Return warnings about classes whose training or test images are all among the `corrupt` images of a domain."""
    before, warnings = _one_sided(plan, frozenset()), list[str]()
    for split, found in _one_sided(plan, corrupt).items():
        lost = [f"{name} ({count})" for name, count in found.items() if name not in before[split]]
        warnings += _without_images(split, lost, " that can be decoded")
    return warnings


def reject(plan: Plan, warnings: Sequence[str], strict: bool) -> None:
    """Raise UserError if there are warnings and `strict` is true."""
    if strict and warnings:
        raise UserError(f"{plan.root}: `--strict` allows no warnings, but {'; '.join(warnings)}.")


def _similar_classes(names: Sequence[str]) -> Iterator[str]:
    alike: dict[str, list[str]] = defaultdict(list)
    for name in names:
        plain = unicodedata.normalize("NFKC", name).casefold()
        alike[re.sub(r"[\s_-]+", " ", plain).strip()].append(name)
    for group in alike.values():
        if len(group) > 1:
            yield f"{' and '.join(f'`{one}`' for one in group)} are different classes, although their names are alike"


def _empty_folders(folders: Sequence[str]) -> Iterator[str]:
    if folders:
        counted = _count(len(folders), "class folder is", "class folders are")
        yield f"{counted} empty: {summarise_list(folders, SHOWN)}; a class without any image is left out"


def _left_out(paths: Sequence[str]) -> Iterator[str]:
    if paths:
        yield (
            f"{_count(len(paths), 'file is', 'files are')} left out, because the format cannot be read: "
            f"{summarise_list(paths, SHOWN)}"
        )


def _one_sided(plan: Plan, corrupt: Set[str]) -> dict[str, dict[str, str]]:
    """Return the classes that have no `test` images or no `training` images in a domain without the corrupt images.

    The classes are keyed by the kind of images that they lack. For each class, named with its domain, the value is the
    number of its other images.
    """
    lacking: dict[str, dict[str, str]] = {"test": {}, "training": {}}
    for domain in plan.domains:
        train, test = (Counter(item.label for _, item in part) for part in domain.parts(corrupt))
        for label in sorted({*train, *test}):
            where = f"`{plan.listing.class_names[label]}` of `{domain.name}`"
            if not test[label]:
                lacking["test"][where] = f"{train[label]} in training"
            elif not train[label]:
                lacking["training"][where] = f"{test[label]} in test"
    return lacking


def _without_images(split: str, classes: Sequence[str], detail: str = "") -> list[str]:
    """Return a warning about classes that have no images in a split; empty if there are no such classes."""
    if not classes:
        return []
    subject = _count(len(classes), "class has", "classes have")
    return [f"{subject} no {split} image{detail}: {summarise_list(classes, SHOWN, quote='')}"]


def _count(number: int, one: str, several: str) -> str:
    return f"{number} {one if number == 1 else several}"
