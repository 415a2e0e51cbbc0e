"""All layouts that `fedsweep data prepare` can read, and the function that finds the layout of a data set.

A layout is an arrangement of image files, such as `<domain>/<class>/<image>`. A new layout needs a class, an entry in
`ALL`, and a tree of example files in the tests.
"""

from pathlib import Path

from fedsweep.common.errors import UserError, near, summarise_list
from fedsweep.preparation.layouts.base import Layout, side
from fedsweep.preparation.layouts.disk_listing import Folder, fold, list_folder, unexpected
from fedsweep.preparation.layouts.domain_lists import DomainNet, ImageClef, Nico, OfficeHome
from fedsweep.preparation.layouts.folders import SPLITS, Classes, Domains, EuroSat, below_splits
from fedsweep.preparation.layouts.parquet import Parquet, open_parquet, parquet_files
from fedsweep.preparation.layouts.split_lists import Food101, Pacs, Ucf101

ALL: tuple[type[Layout], ...] = (
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


def find(name: str, root: Path, layout: str | None = None) -> Layout:
    """Return the layout of the data set `name` in the folder `root`.

    If `layout` is None, the layout is detected from the first of these clues that applies:

    - Parquet files that contain images
    - the name of the data set
    - the depth of the folders that contain images

    Raises:
        UserError: `root` cannot be read, `layout` is not the name of a layout, or no layout fits.
    """
    layouts = {one.name: one for one in ALL}
    if layout is not None:
        if layout not in layouts:
            hint = near(layout, layouts) or f"; the layouts are {', '.join(layouts)}."
            raise UserError(f"there is no layout `{layout}`{hint}")
        return layouts[layout]()
    outer = list_folder(root)
    if any("image" in open_parquet(root / name).schema_arrow.names for name in parquet_files(outer)):
        return Parquet()
    named = {fold(one): layouts[one] for one in layouts} | _OTHER_SPELLINGS
    if fold(name) in named:
        return named[fold(name)]()
    _refuse_stray_splits(outer)
    if below := below_splits(outer):
        return Classes() if below == "classes" else Domains()
    for folder in outer.inner():
        if folder.images:
            return Classes()
        if any(deeper.images for deeper in folder.inner()) or below_splits(folder) == "classes":
            return Domains()
    if parquet_files(outer):
        return Parquet()  # its error message explains what is wrong with the files
    kinds = "`<domain>/<class>/<image>`, `<class>/<image>` or `*.parquet`"
    raise unexpected(root, "domains` or `classes", f"{kinds} (`{name}` is not the name of a layout)")


def _refuse_stray_splits(outer: Folder) -> None:
    """Raise UserError if `outer` contains both split folders, such as `train` and `test`, and other folders.

    If all of them were read as domains, test images would be used for training.
    """
    splits = [name for name in outer.folders if name.lower() in SPLITS]
    others = [name for name in outer.folders if name not in splits]
    if others and len({side(SPLITS[name.lower()]) for name in splits}) > 1:
        raise UserError(
            f"{outer.path}: the folders {summarise_list(splits)} are named after splits, but {summarise_list(others)} "
            f"{'is' if len(others) == 1 else 'are'} not; move the other folders away to read the splits, or set "
            "`--layout domains` to read each folder as a domain."
        )
