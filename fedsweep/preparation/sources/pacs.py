"""PACS: 4 domains (art_painting, cartoon, photo, sketch), 7 classes, 9,991 images.

Layout: `<domain>/<class>/<image>` and the lists `<domain>_{train,crossval,test}_kfold.txt`, each at the root or in a
folder up to two levels below it, whatever it is called: the authors' are `kfold/` and `Train val splits and h5py files
pre-read/`, others' `pacs_data/` and `pacs_label/`. Lines are `sketch/dog/n02103406_1170-6.png 1`, with labels from 1.

Split: the authors' test list is the whole domain, for training on the other three; train and crossval are its two
parts. Here all domains take part in training, so train is the train list and test is all the rest, which is crossval:
the two are disjoint and nothing is lost. Without lists there is no split.

The class is the folder's, and a list says only what is train: the lists have slips (in copies of art_painting's
crossval list, one dog has label 0, and `pic_248` stands twice where `pic_249` is missing). Domains that are not there
are left out.

Li, Yang, Song, Hospedales. Deeper, Broader and Artier Domain Generalization. ICCV 2017.
"""

from collections.abc import Sequence
from pathlib import Path

from fedsweep.common.errors import UserError
from fedsweep.preparation.sources.base import Item, Listing, Source
from fedsweep.preparation.sources.checks import listing, tree
from fedsweep.preparation.sources.files import (
    Present,
    join,
    look,
    look_at_root,
    only_folder,
    read_list,
    some,
    unexpected,
)

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
