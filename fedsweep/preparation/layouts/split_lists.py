"""The layouts of Food101, PACS and UCF101, which have lists of training and test images."""

import os
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

from fedsweep.common.errors import UserError, near, summarise_list
from fedsweep.preparation.layouts.base import (
    BOTH,
    ExistingFiles,
    Item,
    Layout,
    Line,
    Listing,
    label_within,
    read_lines,
    read_list,
    refuse_twice,
    tree,
)
from fedsweep.preparation.layouts.disk_listing import (
    Folder,
    join,
    list_folder,
    only_folder,
    unexpected,
)


def _read_splits(root: Path, pattern: str, domain: str) -> list[Line]:
    """Return the lines of the training and test lists, or raise UserError if an image is listed twice.

    `pattern` is the path of a list, relative to the root, with `{}` in place of `train` or `test`.
    """
    lines = [line for split in BOTH for line in read_list(root, pattern.format(split), domain, split, labels=False)]
    refuse_twice(lines)
    return lines


class Food101(Layout):
    """The layout of Food101: a folder per class, and lists of the training and test images."""

    name = "food101"
    looks_like = "images/<class>/<id>.jpg, meta/{classes,train,test}.txt"

    def _find(self, root: Path, num_classes: int | None) -> Listing:
        looked_for = "the folders `images` and `meta`, also in `food-101/`"
        base = self._folder(root, ("", "food-101"), lambda folder: {"images", "meta"} <= {*folder.folders}, looked_for)
        names = [name for _, name in read_lines(root, join(base, "meta/classes.txt"))]
        labels = {name: label for label, name in enumerate(names)}
        if len(labels) != len(names):
            raise UserError(f"{root / base / 'meta/classes.txt'} must list each class only once.")
        existing = ExistingFiles(root)
        items = []
        for line in _read_splits(root, join(base, "meta/{}.txt"), self.name):
            class_name = line.path.split("/")[0]
            if class_name not in labels:
                raise UserError(f"{line.where}: there is no class `{class_name}`{near(class_name, names) or '.'}")
            path = join(base, "images", f"{line.path}.jpg")
            existing.require(path, line.where)
            items.append(Item(path, labels[class_name], line.domain, line.split))
        return Listing(tuple(names), (self.name,), tuple(items))


_PACS_DOMAINS = frozenset({"art_painting", "cartoon", "photo", "sketch"})


class Pacs(Layout):
    """The layout of PACS: a folder per domain and class, and optional lists that define the split."""

    name = "pacs"
    looks_like = "[kfold/]<domain>/<class>/*, <domain>_{train,crossval,test}_kfold.txt or no lists"

    def _find(self, root: Path, num_classes: int | None) -> Listing:
        base = only_folder(root, "the domains' folders", lambda folder: not _PACS_DOMAINS.isdisjoint(folder.folders))
        if base is None:
            looked_for = "the folders `art_painting`, `cartoon`, `photo`, `sketch`, at most two folders below"
            raise unexpected(root, self.name, looked_for)
        domains = sorted(_PACS_DOMAINS.intersection(list_folder(root / base).folders))
        found = tree(root, [(domain, join(base, domain), None) for domain in domains], tuple(_PACS_DOMAINS))
        place = only_folder(root, "the lists", lambda folder: any(name.endswith("_kfold.txt") for name in folder.files))
        if place is None:
            return found
        train, crossval = self._listed(root, base, place, domains)
        items = (
            replace(item, split="train" if item.path in train else "test", validation=item.path in crossval)
            for item in found.items
        )
        return replace(found, items=tuple(items))

    def _listed(self, root: Path, base: str, place: str, domains: Sequence[str]) -> tuple[set[str], set[str]]:
        """Return the paths of the training images and the paths of the validation images.

        The training images of a domain are listed in `<domain>_train_kfold.txt` in the folder `place`, and the
        validation images in `<domain>_crossval_kfold.txt`. The listed paths are relative to the folder `base`.

        Raises:
            UserError: A training list is missing, a listed image does not exist, or training and validation lists
                overlap.
        """
        existing, train, crossval = ExistingFiles(root), set[str](), set[str]()
        files = set(list_folder(root / place).files)
        for domain in domains:
            listed: dict[str, set[str]] = {}
            for part in ("train", "crossval", "test"):
                name = f"{domain}_{part}_kfold.txt"
                if name not in files and part == "train":
                    raise UserError(f"{root / place} has lists `<domain>_train_kfold.txt`, but not `{name}`.")
                lines = read_list(root, join(place, name), domain, None) if name in files else []
                for line in lines:
                    existing.require(join(base, line.path), line.where)
                listed[part] = {join(base, line.path) for line in lines}
            if both := sorted(listed["train"] & listed["crossval"]):
                raise UserError(
                    f"{root / place}: the lists of `{domain}` must not overlap, but train and crossval both contain "
                    f"{summarise_list(both)}."
                )
            train |= listed["train"]
            crossval |= listed["crossval"]
        return train, crossval


_UCF_FOLDERS = ("UCF-101-midframes", "UCF-101", "jpegs_256", "rawframes", "frames", "images", "")
_UCF_LISTS = ("ucfTrainTestlist", "")
_UCF_FILES = {"classInd.txt", "trainlist01.txt", "testlist01.txt"}


class Ucf101(Layout):
    """The layout of UCF101: video frames, and lists of training and test videos.

    Only the middle frame of each video is read. Clips of the same source video are one group.
    """

    name = "ucf101"
    looks_like = "UCF-101-midframes/<Class_Name>/v_*.jpg or <ClassName>/v_*/<frame>.jpg, ucfTrainTestlist/*01.txt"

    def _find(self, root: Path, num_classes: int | None) -> Listing:
        looked_for = "`ucfTrainTestlist/{classInd,trainlist01,testlist01}.txt` and image folders"
        place = self._folder(root, _UCF_LISTS, lambda folder: set(folder.files) >= _UCF_FILES, looked_for)
        base = self._folder(root, _UCF_FOLDERS, lambda folder: bool(set(folder.folders) - {*_UCF_LISTS}), looked_for)
        names = _class_names(root, join(place, "classInd.txt"))
        labels = {_plain(name): label for label, name in enumerate(names)}
        class_folders = {_plain(name): name for name in list_folder(root / base).folders}  # may be empty
        list_once = cache(lambda folder: list_folder(root / folder))
        items = []
        for line in _read_splits(root, join(place, "{}list01.txt"), self.name):
            class_name, _, video = line.path.rpartition("/")
            if (label := labels.get(_plain(class_name))) is None:
                hint = near(class_name, [name.replace("_", "") for name in names]) or "."
                raise UserError(f"{line.where}: there is no class `{class_name}`{hint}")
            if line.label is not None and label_within(line, len(names), first=1) != label:
                raise UserError(
                    f"{line.where}: the label of class `{class_name}` must be {label + 1}, but it is {line.label}."
                )
            if num_classes is None or label < num_classes:
                folder = join(base, class_folders.get(_plain(class_name), ""))
                frame = _middle_frame(list_once(folder), os.path.splitext(video)[0], line.where)
                items.append(Item(join(folder, frame), label, line.domain, line.split, _source_video(video, label)))
        return Listing(tuple(names), (self.name,), tuple(items))


def _source_video(clip: str, label: int) -> str | None:
    """Return the group of a clip, `<label>/g<number>`, or None if its name is not v_<Class>_g<number>_c<number>.

    The clips of a group were cut from the same source video.
    """
    found = re.search(r"_(g\d+)_c\d+\b", clip)
    return f"{label}/{found[1]}" if found else None


def _middle_frame(folder: Folder, video: str, where: str) -> str:
    """Return the path of the middle frame of a video, relative to `folder`.

    If `folder` contains an image that is named after the video, return the path of this image. Otherwise, the frames
    are in a subfolder that is named after the video. Raise UserError if there are no frames. `where` is the location of
    the line that lists the video.
    """
    stems = [os.path.splitext(image)[0] for image in folder.images]
    if video in stems:
        return folder.images[stems.index(video)]
    images = list_folder(folder.path / video).images if video in folder.folders else ()
    frames = [name for name in images if not name.startswith("flow_")]  # optical flow
    if not frames:
        hint = near(video, [*stems, *folder.folders]) or "."
        raise UserError(f"{where}: there is no frame of `{video}` in {folder.path}{hint}")
    kinds = sorted({re.sub(r"\d+$", "", os.path.splitext(name)[0]) for name in frames})
    if len(kinds) > 1:
        raise UserError(
            f"{folder.path / video}: the names of a video's frames must differ only in their numbers, "
            f"but they begin with {summarise_list(kinds)}."
        )
    return join(video, sorted(frames, key=_by_number)[len(frames) // 2])


def _class_names(root: Path, name: str) -> list[str]:
    names: list[str] = []
    for where, text in read_lines(root, name):
        number, _, class_name = text.partition(" ")
        if number != str(len(names) + 1) or not class_name.strip():
            raise UserError(f"{where}: the line must be `{len(names) + 1} <ClassName>`, but it is `{text}`.")
        # Words are separated, as in CoOp's folder names, because prompts contain the class names.
        names.append(re.sub(r"(?<=[a-z])(?=[A-Z])", "_", class_name.strip()))
    return names


def _plain(name: str) -> str:
    # The lists spell HandstandPushups, but the videos and some folders spell HandStandPushups.
    return name.replace("_", "").casefold()


def _by_number(name: str) -> tuple[list[int], str]:
    """Return a sort key that orders frame names by number, so that frame 10 comes after frame 9."""
    return [int(digits) for digits in re.findall(r"\d+", name)], name
