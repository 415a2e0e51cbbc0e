"""Data sets as decoded images in memory, by domain, and their partition into clients."""

from functools import lru_cache

from fedsweep.data.digits import DigitsData
from fedsweep.data.partition import FeatureSkew
from fedsweep.types import FederatedData

DataConfig = DigitsData
PartitionConfig = FeatureSkew


@lru_cache(maxsize=2)
def load(config: DataConfig) -> FederatedData:
    """Decode once per process; trials of a reused worker share the images."""
    return config.load()
