"""What becomes of images that cannot be decoded."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from fedsweep.common.errors import UserError
from fedsweep.preparation.split import DomainPlan

CORRUPT = "corrupt.txt"
SHOWN = 10
Corrupt = Sequence[tuple[str, str, str]]
"""Domain, path within the root, and reason."""


def some(corrupt: Corrupt) -> str:
    """The first ten with their reasons, and how many more there are."""
    shown = ", ".join(f"{path} ({reason})" for _, path, reason in corrupt[:SHOWN])
    return shown + (f" and {len(corrupt) - SHOWN} more" if len(corrupt) > SHOWN else "")


def count(corrupt: Corrupt) -> str:
    """`1 image` or `12 images`."""
    return f"{len(corrupt)} image{'s' * (len(corrupt) != 1)}"


def write_list(path: Path, corrupt: Corrupt) -> None:
    """One line per image, its path and the reason; no file where there is none."""
    if corrupt:
        path.write_text("".join(f"{name}\t{reason}\n" for _, name, reason in corrupt), encoding="utf-8")
    else:
        path.unlink(missing_ok=True)


def refuse(name: str, corrupt: Corrupt, path: Path) -> UserError:
    """The sentence that ends a preparation which may not skip."""
    return UserError(
        f"{count(corrupt)} of {name} cannot be decoded: {some(corrupt)}; {path} lists all, and `--skip-corrupt` "
        "leaves them out without decoding the others again."
    )


def check_complete(domains: Sequence[DomainPlan], class_names: Sequence[str], corrupt: Corrupt) -> None:
    """Refuse a store in which a split, or a class of a domain, has lost all of its images.

    Raises:
        UserError: with the first such class or split.
    """
    if not corrupt:
        return
    bad = {(domain, path) for domain, path, _ in corrupt}
    for domain in domains:
        placed = list(zip(domain.slots, domain.items, strict=True))
        good = [(slot, item) for slot, item in placed if (domain.name, item.path) not in bad]
        before, after = (Counter(item.label for _, item in items) for items in (placed, good))
        for label in sorted(before):
            if not after[label]:
                raise UserError(
                    f"the class `{class_names[label]}` of the domain `{domain.name}` has no image that can be decoded, "
                    f"of {before[label]}; without it the data set would be another one."
                )
        for split, train in (("train", True), ("test", False)):
            if not any((slot < domain.train) == train for slot, _ in good):
                raise UserError(f"the domain `{domain.name}` has no {split} image that can be decoded.")
