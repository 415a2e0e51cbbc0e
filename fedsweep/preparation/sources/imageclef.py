"""ImageCLEF-DA: 4 domains (b Bing, c Caltech-256, i ImageNet, p Pascal VOC), 12 classes, 600 images each; no split.

Layout: images under `b/ c/ i/ p/` (those of b and c in folders of Caltech-256's names) and `list/{b,c,i,p}List.txt`, in
some copies beside the domain folders, lines such as `c/113.hummingbird/113_0114.jpg 2`. Labels are the lists'. Lists
that are not there leave their domain out, as most papers do with b.

An image may be listed with two labels, and counts twice then: the authors' list of p does so with nine images that show
two things, and its 600 include them.

The lists do not name the classes. Their names and order are those of public readers of the set; ImageNet's and
Caltech-256's identifiers in the lists of i (n02691156 is label 0, n02834778 is 1, ...) and c confirm them.

Caputo, Patricia. Overview of the ImageCLEF 2014 Domain Adaptation Task. CLEF 2014 working notes.
https://www.imageclef.org/2014/adaptation
"""

from pathlib import Path

from fedsweep.preparation.sources.base import Item, Listing, Source
from fedsweep.preparation.sources.checks import label_within, listing
from fedsweep.preparation.sources.files import (
    Present,
    first_folder,
    join,
    look,
    look_at_root,
    read_list,
    refuse_twice,
    unexpected,
)

_CLASSES = (
    *("aeroplane", "bike", "bird", "boat", "bottle", "bus"),
    *("car", "dog", "horse", "monitor", "motorbike", "people"),
)
_LISTS = {"bList.txt": "b", "cList.txt": "c", "iList.txt": "i", "pList.txt": "p"}


class ImageClef(Source):
    """The images that the lists name."""

    name = "imageclef"
    looks_like = "{b,c,i,p}/**/*.jpg, list/{b,c,i,p}List.txt"

    def list(self, root: Path, num_classes: int | None = None) -> Listing:
        """All images of the first `num_classes` classes."""
        look_at_root(root)
        place = first_folder(root, ("list", ""), lambda there: bool(_LISTS.keys() & set(there.files)))
        if place is None:
            raise unexpected(root, self.name, "`list/{b,c,i,p}List.txt` or `{b,c,i,p}List.txt`")
        present = Present(root)
        lines, items = [], []
        for name in look(root / place).files:
            if name not in _LISTS:
                continue
            for line in read_list(root, join(place, name)):
                label = label_within(line, len(_CLASSES))
                present.require(line.path, line.where)
                lines.append(line)
                items.append(Item(line.path, label, _LISTS[name], None))
        refuse_twice(lines, by_label=True)
        return listing(root, _CLASSES, items, num_classes, _LISTS.values())
