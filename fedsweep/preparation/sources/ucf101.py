"""UCF101: 101 classes of actions, 13,320 videos, of which the middle frame is the image; one domain, `ucf101`.

Layouts of the images, each at the root or in one of the folders below:

- one middle frame per video, as CoOp ships them: `UCF-101-midframes/<Class_Name>/v_<ClassName>_g01_c01.jpg`;
- a folder of frames per video, `<ClassName>/v_<ClassName>_g01_c01/<frame>.jpg` or without the class folder
  `v_<ClassName>_g01_c01/<frame>.jpg`: of n frames, in the order of their numbers, number n // 2 (from 0) is taken.
  Pictures of optical flow among them (`flow_x_00001.jpg`) are left out.

Lists, in `ucfTrainTestlist/` or at the root: `classInd.txt` (`1 ApplyEyeMakeup`), `trainlist01.txt`
(`ApplyEyeMakeup/v_ApplyEyeMakeup_g08_c01.avi 1`) and `testlist01.txt` (the same, mostly without labels): the first of
the authors' three splits. Classes are named with underscores, `Apply_Eye_Makeup`, whatever their folders are called.

Soomro, Zamir, Shah. UCF101: A Dataset of 101 Human Actions Classes From Videos in The Wild. CRCV-TR-12-01, 2012.
https://www.crcv.ucf.edu/data/UCF101.php. Middle frames: Zhou, Yang, Loy, Liu. Learning to Prompt for Vision-Language
Models. IJCV 2022. https://github.com/KaiyangZhou/CoOp/blob/main/DATASETS.md
"""

import os
import re
from functools import cache
from pathlib import Path

from fedsweep.common.errors import UserError, near
from fedsweep.preparation.sources.base import Item, Listing, Source, Split
from fedsweep.preparation.sources.checks import label_within, listing
from fedsweep.preparation.sources.files import (
    Folder,
    first_folder,
    join,
    look,
    look_at_root,
    read_lines,
    read_list,
    refuse_twice,
    some,
    unexpected,
)

_FOLDERS = ("UCF-101-midframes", "UCF-101", "jpegs_256", "rawframes", "frames", "images", "")
_LISTS = ("ucfTrainTestlist", "")
_FLOW = "flow_"
_NEEDED = ("classInd.txt", "trainlist01.txt", "testlist01.txt")


class Ucf101(Source):
    """The middle frame of every video that the two lists name."""

    name = "ucf101"
    looks_like = "UCF-101-midframes/<Class_Name>/v_*.jpg or <ClassName>/v_*/<frame>.jpg, ucfTrainTestlist/*01.txt"

    def list(self, root: Path, num_classes: int | None = None) -> Listing:
        """All images of the first `num_classes` classes."""
        look_at_root(root)
        place = first_folder(root, _LISTS, lambda there: set(_NEEDED) <= set(there.files))
        base = first_folder(root, _FOLDERS, lambda there: bool(set(there.folders) - {*_LISTS}))
        if place is None or base is None:
            raise unexpected(
                root, self.name, "`ucfTrainTestlist/{classInd,trainlist01,testlist01}.txt` and image folders"
            )
        names = _class_names(root, join(place, "classInd.txt"))
        plain = [_plain(name) for name in names]
        videos = _Videos(root, base)
        lines, items = [], []
        splits: tuple[Split, ...] = ("train", "test")
        for split in splits:
            for line in read_list(root, join(place, f"{split}list01.txt"), labels=False):
                class_name, _, video = line.path.rpartition("/")
                if _plain(class_name) not in plain:
                    hint = near(class_name, [name.replace("_", "") for name in names]) or "."
                    raise UserError(f"{line.where}: there is no class `{class_name}`{hint}")
                label = plain.index(_plain(class_name))
                if line.label is not None and label_within(line, len(names), first=1) != label:
                    raise UserError(f"{line.where}: class `{class_name}` has label {label + 1}, but here {line.label}.")
                lines.append(line)
                if num_classes is None or label < num_classes:
                    frame = videos.frame(class_name, os.path.splitext(video)[0], line.where)
                    items.append(Item(frame, label, self.name, split))
        refuse_twice(lines)
        return listing(root, names, items, num_classes)


class _Videos:
    """Where the frames of a video are; each folder is listed once."""

    def __init__(self, root: Path, base: str) -> None:
        self._root, self._base = root, base
        self._look = cache(lambda folder: look(root / folder))
        self._folders = {_plain(name): name for name in look(root / base).folders}

    def frame(self, class_name: str, video: str, where: str) -> str:
        """The path of the video's middle frame.

        Raises:
            UserError: there is none.
        """
        if _plain(class_name) in self._folders:
            folder = join(self._base, self._folders[_plain(class_name)])
        else:  # no class folders
            folder = self._base
        there: Folder = self._look(folder)
        for image in there.images:
            if os.path.splitext(image)[0] == video:
                return join(folder, image)
        frames = self._frames(join(folder, video)) if video in there.folders else []
        if not frames:
            stems = [os.path.splitext(image)[0] for image in there.images] + [*there.folders]
            hint = near(video, stems) or "."
            raise UserError(f"{where}: no frame of `{video}` is under {self._root / folder}{hint}")
        return join(folder, video, sorted(frames, key=_by_number)[len(frames) // 2])

    def _frames(self, folder: str) -> list[str]:
        frames = [name for name in look(self._root / folder).images if not name.startswith(_FLOW)]
        kinds = sorted({re.sub(r"\d+$", "", os.path.splitext(name)[0]) for name in frames})
        if len(kinds) > 1:
            raise UserError(
                f"{self._root / folder}: the frames of a video must be called alike but for their numbers, "
                f"but they begin with {some(kinds)}."
            )
        return frames


def _class_names(root: Path, name: str) -> list[str]:
    names: list[str] = []
    for where, text in read_lines(root, name):
        number, _, class_name = text.partition(" ")
        if number != str(len(names) + 1) or not class_name.strip():
            raise UserError(f"{where}: must be `{len(names) + 1} <ClassName>`, but it is `{text}`.")
        # Words apart, as CoOp names the folders: prompts are made of them.
        names.append(re.sub(r"(?<=[a-z])(?=[A-Z])", "_", class_name.strip()))
    return names


def _plain(name: str) -> str:
    # The lists write HandstandPushups where the videos, and some folders, write HandStandPushups.
    return name.replace("_", "").casefold()


def _by_number(name: str) -> tuple[list[int], str]:
    """Frame 10 comes after frame 9, with leading zeros or without."""
    return [int(digits) for digits in re.findall(r"\d+", name)], name
