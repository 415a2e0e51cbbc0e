"""From domains to clients. One file per partition; this is the list."""

from typing import Annotated

from pydantic import Field

from fedsweep.data.partition.base import POOL, Partition, Split
from fedsweep.data.partition.centralized import Centralized
from fedsweep.data.partition.feature_label_skew import FeatureLabelSkew
from fedsweep.data.partition.feature_skew import FeatureSkew
from fedsweep.data.partition.iid import Iid
from fedsweep.data.partition.label_skew import LabelSkew

AnyPartition = FeatureSkew | FeatureLabelSkew | LabelSkew | Iid | Centralized
PartitionConfig = Annotated[AnyPartition, Field(discriminator="name")]

__all__ = [
    "POOL",
    "AnyPartition",
    "Centralized",
    "FeatureLabelSkew",
    "FeatureSkew",
    "Iid",
    "LabelSkew",
    "Partition",
    "PartitionConfig",
    "Split",
]
