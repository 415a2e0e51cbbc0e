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
    return _load(config, *_where(config))


def _where(config: DigitsData | PreparedData) -> tuple[Path | None, int]:
    """The card that a prepared set has now, and its time: a set that was made anew is not the one in the cache."""
    if not isinstance(config, PreparedData):
        return None, 0
    card = store_folder(config.set, config.size) / CARD
    return card, card.stat().st_mtime_ns if card.exists() else 0


@lru_cache(maxsize=4)
def _load(config: DigitsData | PreparedData, _card: Path | None, _time: int) -> FederatedData:
    return config.load()


__all__ = ["DataConfig", "DigitsData", "PartitionConfig", "PreparedData", "SyntheticConfig", "load"]
