"""Configuration types for an experiment's data, and the function that loads the data set.

Other installed packages add data sources with entry points in the group `fedsweep.data`. Their classes inherit from
`fedsweep.data.prepared.dataset.Data`.
"""

from dataclasses import replace
from functools import cache, lru_cache, reduce
from operator import or_
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from fedsweep.common import plugins
from fedsweep.data.digits import DigitsData
from fedsweep.data.groups import check_groups_known
from fedsweep.data.image_sets import hold_out
from fedsweep.data.partition import PartitionConfig
from fedsweep.data.prepared.card import CARD, store_folder
from fedsweep.data.prepared.dataset import Data, PreparedData
from fedsweep.data.synthetic.generated import Diffusers, Folder, NoSynthetic
from fedsweep.data.synthetic.surrogate import Surrogate
from fedsweep.types import FederatedData

BUILT_IN: tuple[type[Data], ...] = (DigitsData, PreparedData)


@cache
def data_sources() -> tuple[type[Data], ...]:
    """Return the classes of all data sources: those of fedsweep, and those of other installed packages."""
    others = plugins.load("data", Data, map(plugins.name_of, BUILT_IN))  # type: ignore[type-abstract]
    return (*BUILT_IN, *others)


if TYPE_CHECKING:
    DataConfig = Annotated[DigitsData | PreparedData, Field(discriminator="name")]
else:
    DataConfig = Annotated[reduce(or_, data_sources()), Field(discriminator="name")]
SyntheticConfig = Annotated[NoSynthetic | Surrogate | Folder | Diffusers, Field(discriminator="name")]
VALIDATION_SEED = 0  # constant, so that all runs of a data set have the same validation images


def load(config: Data) -> FederatedData:
    """Load the data set that `config` selects.

    Each process caches its data sets, so the trials in one process share the images in memory.
    """
    version = None
    if isinstance(config, PreparedData):  # a data set that was prepared again is loaded again
        card = store_folder(config.set, config.size) / CARD
        version = card, card.stat().st_mtime_ns if card.exists() else 0
    return _load(config, version)


@lru_cache(maxsize=4)
def _load(config: Data, _version: tuple[Path, int] | None) -> FederatedData:
    share = config.validation_fraction
    return config.load() if share == "listed" else with_validation(config.load(), share)


def with_validation(data: FederatedData, fraction: float) -> FederatedData:
    """Hold out a fraction of the training images of each domain as validation images, in whole groups.

    Domains that no client has keep their images: they have no training images.
    """
    if not fraction:
        return data
    setting = "data.validation_fraction"
    check_groups_known(data, f"`{setting}`")
    sets = {one.name: one.train for one in data.domains}
    held, rest = hold_out(sets, fraction, VALIDATION_SEED, "data/validation", setting)
    domains = (replace(one, train=rest[one.name], validation=held[one.name]) for one in data.domains)
    return replace(data, domains=tuple(domains))


__all__ = [
    "DataConfig",
    "DigitsData",
    "PartitionConfig",
    "PreparedData",
    "SyntheticConfig",
    "data_sources",
    "load",
    "with_validation",
]
