"""Training a backbone from scratch on a prepared data set: `fedsweep pretrain`."""

from fedsweep.pretraining.config import PretrainConfig
from fedsweep.pretraining.loop import EpochTable, Session, train
from fedsweep.pretraining.start import alone, default_out, start, write_result
from fedsweep.pretraining.state import EpochRecord

__all__ = [
    "EpochRecord",
    "EpochTable",
    "PretrainConfig",
    "Session",
    "alone",
    "default_out",
    "start",
    "train",
    "write_result",
]
