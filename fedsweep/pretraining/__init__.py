"""Training a backbone from scratch on a prepared data set: `fedsweep pretrain`."""

from fedsweep.pretraining.config import PretrainConfig
from fedsweep.pretraining.display import EpochTable
from fedsweep.pretraining.loop import Session, train
from fedsweep.pretraining.result import write_result
from fedsweep.pretraining.start import alone, default_out, start
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
