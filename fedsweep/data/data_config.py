"""The data set that an experiment names, and its images, loaded once per process."""

from functools import lru_cache
from pathlib import Path
from typing import Annotated

from pydantic import Field

from fedsweep.data.digits import DigitsData
from fedsweep.data.partition import PartitionConfig
from fedsweep.data.prepared.card import CARD, store_folder
from fedsweep.data.prepared.dataset import PreparedData
from fedsweep.data.synthetic import SyntheticConfig
from fedsweep.types import FederatedData

DataConfig = Annotated[DigitsData | PreparedData, Field(discriminator="name")]


def load(config: DigitsData | PreparedData) -> FederatedData:
    """Decode or map once per process; trials of a reused worker share the images.

    Raises:
        UserError: a prepared data set is missing, damaged, or not as the configuration says.
    """
    version = None
    if isinstance(config, PreparedData):  # a set that was made anew is not the one in the cache
        card = store_folder(config.set, config.size) / CARD
        version = card, card.stat().st_mtime_ns if card.exists() else 0
    return _load(config, version)


@lru_cache(maxsize=4)
def _load(config: DigitsData | PreparedData, _version: tuple[Path, int] | None) -> FederatedData:
    return config.load()


__all__ = ["DataConfig", "DigitsData", "PartitionConfig", "PreparedData", "SyntheticConfig", "load"]
