"""Data sets as decoded images in memory, by domain, and their partition into clients."""

from functools import lru_cache
from typing import Annotated

from pydantic import Field

from fedsweep.data.digits import DigitsData
from fedsweep.data.partition import PartitionConfig
from fedsweep.data.prepared import PreparedData
from fedsweep.types import FederatedData

DataConfig = Annotated[DigitsData | PreparedData, Field(discriminator="name")]


@lru_cache(maxsize=4)
def load(config: DigitsData | PreparedData) -> FederatedData:
    """Decode or map once per process; trials of a reused worker share the images."""
    return config.load()


__all__ = ["DataConfig", "DigitsData", "PartitionConfig", "PreparedData", "load"]
