"""One file per layout, and THE list of them. A new layout is a new file, its class in `ALL`, and a test."""

from pathlib import Path

from fedsweep.common.errors import UserError, near
from fedsweep.preparation.layouts.base import Source
from fedsweep.preparation.layouts.disk_listing import Folder, look, look_at_root, some, unexpected
from fedsweep.preparation.layouts.domain_lists import DomainNet, ImageClef, Nico, OfficeHome
from fedsweep.preparation.layouts.folders import SPLITS, Classes, Domains, EuroSat, has_splits
from fedsweep.preparation.layouts.parquet import Parquet, holds_images, parquet_files
from fedsweep.preparation.layouts.split_lists import Food101, Pacs, Ucf101

ALL: tuple[type[Source], ...] = (
    DomainNet,
    Nico,
    OfficeHome,
    ImageClef,
    Pacs,
    Food101,
    EuroSat,
    Ucf101,
    Domains,
    Classes,
    Parquet,
)

_OTHER_SPELLINGS = {"imageclefda": ImageClef, "nicopp": Nico, "nico++": Nico}


def find(name: str, root: Path, layout: str | None = None) -> Source:
    """The source that reads a root: by `layout`, else by Parquet files there, else by name, else by the folders' depth.

    Args:
        name: What the user calls the data set, e.g. `pacs`, `Office-Home` or `my_photos`.
        root: Its folder.
        layout: A name of `ALL`, which wins over everything.

    Raises:
        UserError: there is no such root or layout, or nothing fits.
    """
    layouts = {source.name: source for source in ALL}
    if layout is not None:
        if layout not in layouts:
            hint = near(layout, layouts) or f"; there are {', '.join(layouts)}."
            raise UserError(f"there is no layout `{layout}`{hint}")
        return layouts[layout]()
    there = look_at_root(root)
    if holds_images(root, there):
        return Parquet()
    plain = _plain(name)
    named = {_plain(known): source for known, source in layouts.items()} | _OTHER_SPELLINGS
    if plain in named:
        return named[plain]()
    _refuse_stray_splits(root, there)
    if has_splits(root, there, above="classes"):
        return Classes()
    if has_splits(root, there, above="domains"):
        return Domains()
    for folder in there.folders:
        inside = look(root / folder)
        if inside.images:
            return Classes()
        if any(look(root / folder / deeper).images for deeper in inside.folders):
            return Domains()
        if has_splits(root / folder, inside, above="classes"):
            return Domains()
    if parquet_files(there):
        return Parquet()  # which says what is wrong with them
    known = f"`{name}` is none of the layouts known by name"
    raise unexpected(
        root, "domains` or `classes", f"`<domain>/<class>/<image>`, `<class>/<image>` or `*.parquet` ({known})"
    )


def _refuse_stray_splits(root: Path, there: Folder) -> None:
    """Refuse folders of splits beside others: as domains, test images would be trained on.

    Raises:
        UserError: with both.
    """
    splits = [name for name in there.folders if name.lower() in SPLITS]
    others = [name for name in there.folders if name not in splits]
    if others and len({SPLITS[name.lower()] for name in splits}) > 1:
        raise UserError(
            f"{root}: the folders {some(splits)} are called like splits, but {some(others)} beside them "
            f"{'is' if len(others) == 1 else 'are'} not; without the others the splits are read, and "
            "`--layout domains` takes each folder for a domain."
        )


def _plain(name: str) -> str:
    return name.casefold().replace("_", "").replace("-", "").replace(" ", "")
