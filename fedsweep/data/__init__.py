"""Data sets as decoded images in memory, by domain, and their partition into clients."""

from functools import lru_cache
from pathlib import Path
from typing import Annotated

from pydantic import Field

from fedsweep.data.digits import DigitsData
from fedsweep.data.partition import PartitionConfig
from fedsweep.data.prepared import PreparedData
from fedsweep.paths import data_folder
from fedsweep.types import FederatedData

DataConfig = Annotated[DigitsData | PreparedData, Field(discriminator="name")]


def load(config: DigitsData | PreparedData) -> FederatedData:
    """Decode or map once per process; trials of a reused worker share the images.

    Raises:
        UserError: a prepared data set is missing, damaged, or not as the configuration says.
    """
    return _load(config, data_folder())


@lru_cache(maxsize=4)
def _load(config: DigitsData | PreparedData, _folder: Path) -> FederatedData:
    return config.load()


__all__ = ["DataConfig", "DigitsData", "PartitionConfig", "PreparedData", "load"]
