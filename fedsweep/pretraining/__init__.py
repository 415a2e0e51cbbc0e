"""Training of a backbone from scratch on a prepared data set: `fedsweep pretrain`."""

from fedsweep.pretraining.config import PretrainConfig
from fedsweep.pretraining.loop import EpochTable, Session, train
from fedsweep.pretraining.network import EpochRecord
from fedsweep.pretraining.start import default_out, exclusively, start, write_result

__all__ = [
    "EpochRecord",
    "EpochTable",
    "PretrainConfig",
    "Session",
    "default_out",
    "exclusively",
    "start",
    "train",
    "write_result",
]
