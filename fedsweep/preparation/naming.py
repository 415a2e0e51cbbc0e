"""Who may write a store, and how it gets its name: whole, or not at all."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedsweep.common.files import held
from fedsweep.data.prepared.card import CARD, StoreCard
from fedsweep.preparation.corrupt import CORRUPT
from fedsweep.preparation.scratch import Scratch


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Hold the lock of a store that is being made.

    Raises:
        UserError: another process holds it.
    """
    with held(folder.with_name(f".{folder.name}.lock"), f"another `fedsweep data prepare` is making {folder} now."):
        yield


def recover(folder: Path) -> None:
    """Undo an exchange of stores that was killed between its two steps."""
    old = _old(folder)
    if old.exists() and not folder.exists():
        old.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def _old(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.replaced")


def take_name(part: Path, folder: Path, card: StoreCard) -> None:
    """Rename the work to the store that it has become. Processes that have mapped an older one keep its pages."""
    keep = {CARD, *(f"{name}.arrow" for name in card.domains), *([CORRUPT] if card.skipped else [])}
    for path in part.iterdir():
        if path.name not in keep and path.name != Scratch.LOG:
            path.unlink()
    if folder.exists():
        folder.rename(_old(folder))
    part.rename(folder)
    (folder / Scratch.LOG).unlink()
    shutil.rmtree(_old(folder), ignore_errors=True)
