"""Images that somebody has made already, prepared like any data set."""

from collections.abc import Mapping
from typing import Literal

import torch
from pydantic import Field

from fedsweep.data.partition.base import pool
from fedsweep.data.prepared import PreparedData
from fedsweep.data.synthetic.base import Proportioned
from fedsweep.errors import UserError, near
from fedsweep.images.card import prepared_sizes, read_card, store_folder
from fedsweep.seeding import stream
from fedsweep.types import FederatedData, ImageSet


class Folder(Proportioned):
    """A folder `<domain>/<class>/<image>` of any generator, once `fedsweep data prepare` has decoded it."""

    name: Literal["folder"] = "folder"
    set: str = Field(min_length=1, description="name that the images were prepared under, e.g. `office_home_synthetic`")

    def make(self, data: FederatedData, proxy: Mapping[str, ImageSet], seed: int) -> dict[str, ImageSet]:
        """As many of a domain as `share` says, drawn from all that there are, evenly over its classes.

        Raises:
            UserError: they are not prepared at the size of the data, or lack a class, a domain or images.
        """
        size = data.domains[0].test.take(torch.arange(1))[0].shape[-1]
        return drawn_from(self.set, size, self, data, seed)

    def fingerprint(self) -> str:
        """The digests of the set, at each size that it is prepared at."""
        return " ".join(read_card(store_folder(self.set, size)).digest for size in prepared_sizes(self.set))


def drawn_from(name: str, size: int, config: Proportioned, data: FederatedData, seed: int) -> dict[str, ImageSet]:
    """Images by domain from a prepared set.

    Raises:
        UserError: it is not prepared at this size, or lacks a class, a domain or images.
    """
    domains = tuple(domain.name for domain in data.domains)
    try:
        found = PreparedData(set=name, size=size, domains=domains).load()
    except UserError as error:
        said = str(error).replace("`data.domains`", "`synthetic.set`").replace("`data.", "`synthetic.")
        raise UserError(said) from None
    if set(found.class_names) != set(data.class_names):
        stray = sorted(set(found.class_names) ^ set(data.class_names))[0]
        raise UserError(
            f"`synthetic.set` {name} must have the classes of {data.name}, but `{stray}` is one of "
            f"{'its own' if stray in found.class_names else data.name + ' alone'}{near(stray, data.class_names) or '.'}"
        )
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
                    f"`synthetic.set` {name} must have {count} images of `{data.class_names[label]}` in {domain.name} "
                    f"for a `synthetic.share` of {config.share:g}, but it has {len(own)}."
                )
            order = stream(seed, "synthetic", domain.name, label).permutation(len(own))[:count]
            rows.append(own[torch.from_numpy(order)])
        made[domain.name] = whole.select(torch.cat(rows).sort().values)
    return made
