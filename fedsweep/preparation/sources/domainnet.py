"""DomainNet: 6 domains, 345 classes, about 0.6 million images.

Layout: `<domain>/<class>/<image>` with the lists `<domain>_train.txt` and `<domain>_test.txt`, lines such as
`real/aircraft_carrier/real_001_000001.jpg 0`. The authors' page offers the lists as single files, which lie beside the
domain folders or, by convention, in `splits/`. Labels are the lists'. FedRA takes the labels below 100. Domains whose
folder is not there are left out.

Peng, Bai, Xia, Huang, Saenko, Wang. Moment Matching for Multi-Source Domain Adaptation. ICCV 2019.
http://ai.bu.edu/M3SDA/
"""

from pathlib import Path

from fedsweep.preparation.sources.base import Listing, Source
from fedsweep.preparation.sources.files import look_at_root, unexpected
from fedsweep.preparation.sources.lists import find_lists, list_domains

_CLASSES = 345
_DOMAINS = frozenset({"clipart", "infograph", "painting", "quickdraw", "real", "sketch"})


class DomainNet(Source):
    """The images that the lists name; without `num_classes`, the first 100 classes, or all if there are fewer."""

    name = "domainnet"
    looks_like = "<domain>/<class>/*.jpg, splits/<domain>_{train,test}.txt"
    num_classes = 100

    def list(self, root: Path, num_classes: int | None = None) -> Listing:
        """All images of the first `num_classes` classes."""
        look_at_root(root)
        lists = find_lists(root, ("splits", ""))
        if not lists:
            raise unexpected(root, self.name, "`splits/<domain>_train.txt` or `<domain>_train.txt`")
        return list_domains(root, lists, ("",), _CLASSES, _DOMAINS, num_classes, self.num_classes)
