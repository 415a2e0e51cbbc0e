"""The configuration of an experiment's data set, and the loading of its images."""

from functools import lru_cache
from pathlib import Path
from typing import Annotated

from pydantic import Field

from fedsweep.data.digits import DigitsData
from fedsweep.data.partition import PartitionConfig
from fedsweep.data.prepared.card import CARD, store_folder
from fedsweep.data.prepared.dataset import PreparedData
from fedsweep.data.synthetic.generated import Diffusers, Folder, NoSynthetic
from fedsweep.data.synthetic.surrogate import Surrogate
from fedsweep.types import FederatedData

DataConfig = Annotated[DigitsData | PreparedData, Field(discriminator="name")]
SyntheticConfig = Annotated[NoSynthetic | Surrogate | Folder | Diffusers, Field(discriminator="name")]


def load(config: DigitsData | PreparedData) -> FederatedData:
    """Load the data set that `config` selects.

    A process caches the data sets that it has loaded, so that its trials share the images in memory.
    """
    version = None
    if isinstance(config, PreparedData):  # a data set that was prepared again is loaded again
        card = store_folder(config.set, config.size) / CARD
        version = card, card.stat().st_mtime_ns if card.exists() else 0
    return _load(config, version)


@lru_cache(maxsize=4)
def _load(config: DigitsData | PreparedData, _version: tuple[Path, int] | None) -> FederatedData:
    return config.load()


__all__ = ["DataConfig", "DigitsData", "PartitionConfig", "PreparedData", "SyntheticConfig", "load"]
