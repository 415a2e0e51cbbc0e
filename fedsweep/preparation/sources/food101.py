"""Food-101: 101 classes, 101,000 images, 750 train and 250 test of each class; one domain, `food101`.

Layout: `images/<class>/<id>.jpg` and `meta/{classes,train,test}.txt`, lines such as `apple_pie/1005649`; also one
folder down, in the archive's `food-101/`. Labels are in the order of `classes.txt`.

Bossard, Guillaumin, Van Gool. Food-101: Mining Discriminative Components with Random Forests. ECCV 2014.
https://data.vision.ee.ethz.ch/cvl/datasets_extra/food-101/
"""

from pathlib import Path

from fedsweep.common.errors import UserError, near
from fedsweep.preparation.sources.base import Item, Listing, Source, Split
from fedsweep.preparation.sources.checks import listing
from fedsweep.preparation.sources.files import (
    Present,
    first_folder,
    join,
    look_at_root,
    read_lines,
    read_list,
    refuse_twice,
    unexpected,
)


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
