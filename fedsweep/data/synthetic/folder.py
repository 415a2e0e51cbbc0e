"""Images that somebody has made already, prepared like any data set."""

from collections.abc import Mapping
from typing import Literal

import torch
from pydantic import Field

from fedsweep.common.errors import UserError, near
from fedsweep.common.randomness import stream
from fedsweep.data.base import Data
from fedsweep.data.partition.base import pool
from fedsweep.data.prepared.dataset import PreparedData
from fedsweep.data.synthetic.base import Proportioned
from fedsweep.types import FederatedData, ImageSet


class Folder(Proportioned):
    """A folder `<domain>/<class>/<image>` of any generator, once `fedsweep data prepare` has decoded it."""

    name: Literal["folder"] = "folder"
    set: str = Field(min_length=1, description="name that the images were prepared under, e.g. `office_home_synthetic`")

    def check(self, data: Data) -> None:
        """They are not the clients' own images, nor those that are tested on.

        Raises:
            ValueError: it is the data set itself.
        """
        if isinstance(data, PreparedData) and data.set == self.set:
            raise ValueError(
                f"`synthetic.set` must be images of a generator, but {self.set} is the `data.set`, with its test images"
            )

    def make(self, data: FederatedData, proxy: Mapping[str, ImageSet], seed: int) -> dict[str, ImageSet]:
        """As many of a domain as `share` says, drawn from all that there are, evenly over its classes.

        Raises:
            UserError: they are not prepared at the size of the data, or lack a class, a domain or images.
        """
        return drawn_from(self.set, size_of(data), self, data, seed, (f"`synthetic.set` {self.set}", ""))

    def fingerprint(self, data: FederatedData) -> str:
        """The digest of the set, at the size of the data."""
        return _set(self.set, size_of(data), data, f"`synthetic.set` {self.set}").digest


def size_of(data: FederatedData) -> int:
    """Height and width of its images, pixels."""
    return int(data.domains[0].test.take(torch.arange(1))[0].shape[-1])


def drawn_from(
    name: str, size: int, config: Proportioned, data: FederatedData, seed: int, called: tuple[str, str]
) -> dict[str, ImageSet]:
    """Images by domain from a prepared set; `called` is how a refusal begins, and what would mend it.

    Raises:
        UserError: it is not prepared at this size, has another class, or lacks a domain or images of a class.
    """
    found = _set(name, size, data, called[0])
    places = torch.tensor([data.class_names.index(one) for one in found.class_names])
    made = {}
    for domain, source in zip(data.domains, found.domains, strict=True):
        whole = pool([source.train, source.test])
        whole = ImageSet(whole.images, places[whole.labels], whole.rows)
        wanted = config.labels(domain, len(data.class_names)).bincount(minlength=len(data.class_names))
        rows = []
        for label, count in enumerate(wanted.tolist()):
            own = (whole.labels == label).nonzero().flatten()
            if len(own) < count:
                raise UserError(
                    f"{called[0]} must have {count} images of `{data.class_names[label]}` in {domain.name} "
                    f"for a `synthetic.share` of {config.share:g}, but it has {len(own)}{called[1]}."
                )
            order = stream(seed, "synthetic", domain.name, label).permutation(len(own))[:count]
            rows.append(own[torch.from_numpy(order)])
        made[domain.name] = whole.select(torch.cat(rows).sort().values)
    return made


def _set(name: str, size: int, data: FederatedData, called: str) -> FederatedData:
    """The set, with the domains of the data in their order."""
    try:
        found = PreparedData(set=name, size=size, domains=tuple(domain.name for domain in data.domains)).load()
    except UserError as error:
        said = str(error).replace("`data.domains`", "`synthetic.set`").replace("`data.", "`synthetic.")
        raise UserError(said) from None
    for stray in found.class_names:
        if stray not in data.class_names:
            raise UserError(
                f"{called} must have the classes of {data.name}, but `{stray}` is one of its own"
                f"{near(stray, data.class_names) or '.'}"
            )
    return found
