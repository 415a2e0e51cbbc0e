"""Data sets that list their training and test images: Food101, PACS and UCF101."""

import os
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from fedsweep.common.errors import UserError, near
from fedsweep.preparation.layouts.base import Item, Listing, Source, Split
from fedsweep.preparation.layouts.disk_listing import (
    Folder,
    Present,
    first_folder,
    join,
    look,
    look_at_root,
    only_folder,
    read_lines,
    read_list,
    refuse_twice,
    some,
    unexpected,
)
from fedsweep.preparation.layouts.layout_rules import label_within, listing, tree


class Food101(Source):
    """The images that the two lists name."""

    name = "food101"
    looks_like = "images/<class>/<id>.jpg, meta/{classes,train,test}.txt"

    def list(self, root: Path, num_classes: int | None = None) -> Listing:
        """All images of the first `num_classes` classes."""
        look_at_root(root)
        base = first_folder(root, ("", "food-101"), lambda there: {"images", "meta"} <= set(there.folders))
        if base is None:
            raise unexpected(root, self.name, "the folders `images` and `meta`, also in `food-101/`")
        names = [name for _, name in read_lines(root, join(base, "meta/classes.txt"))]
        labels = {name: label for label, name in enumerate(names)}
        if len(labels) != len(names):
            raise UserError(f"{root / base / 'meta/classes.txt'} must name each class once.")
        present = Present(root)
        lines, items = [], []
        splits: tuple[Split, ...] = ("train", "test")
        for split in splits:
            for line in read_list(root, join(base, f"meta/{split}.txt"), labels=False):
                class_name = line.path.split("/")[0]
                if class_name not in labels:
                    raise UserError(f"{line.where}: there is no class `{class_name}`{near(class_name, names) or '.'}")
                path = join(base, "images", f"{line.path}.jpg")
                present.require(path, line.where)
                lines.append(line)
                items.append(Item(path, labels[class_name], self.name, split))
        refuse_twice(lines)
        return listing(root, names, items, num_classes)


_DOMAINS = frozenset({"art_painting", "cartoon", "photo", "sketch"})


class Pacs(Source):
    """The class folders of each domain, split by the lists where they are there."""

    name = "pacs"
    looks_like = "[kfold/]<domain>/<class>/*, <domain>_{train,crossval,test}_kfold.txt or no lists"

    def list(self, root: Path, num_classes: int | None = None) -> Listing:
        """All images of the first `num_classes` classes."""
        look_at_root(root)
        base = only_folder(root, "the domains' folders", lambda there: bool(_DOMAINS & set(there.folders)))
        if base is None:
            raise unexpected(
                root, self.name, "the folders `art_painting`, `cartoon`, `photo`, `sketch`, up to two folders down"
            )
        domains = sorted(_DOMAINS & set(look(root / base).folders))
        images = tree(root, [(domain, join(base, domain), None) for domain in domains])
        items = images.items()
        place = only_folder(root, "the lists", lambda there: any(name.endswith("_kfold.txt") for name in there.files))
        if place is not None:
            train = self._train(root, base, place, domains)
            items = [Item(i.path, i.label, i.domain, "train" if i.path in train else "test") for i in items]
        return listing(root, images.class_names, items, num_classes, _DOMAINS)

    def _train(self, root: Path, base: str, place: str, domains: Sequence[str]) -> set[str]:
        """The paths of the train lists, once every list agrees with the folders."""
        present = Present(root)
        train: set[str] = set()
        files = set(look(root / place).files)
        for domain in domains:
            listed: dict[str, set[str]] = {}
            for part in ("train", "crossval", "test"):
                name = f"{domain}_{part}_kfold.txt"
                if name not in files and part == "train":
                    raise UserError(f"{root / place} has lists `<domain>_train_kfold.txt`, but not `{name}`.")
                lines = read_list(root, join(place, name)) if name in files else []
                for line in lines:
                    present.require(join(base, line.path), line.where)
                listed[part] = {join(base, line.path) for line in lines}
            both = sorted(listed["train"] & listed["crossval"])
            if both:
                raise UserError(f"{root / place}: the lists of `{domain}` name {some(both)} in train and in crossval.")
            train |= listed["train"]
        return train


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
