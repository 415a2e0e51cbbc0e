"""From domains to clients. One file per partition; this is the list."""

from typing import Annotated

from pydantic import Field

from fedsweep.data.partition.base import POOL, Partition, Split
from fedsweep.data.partition.by_domain import FeatureLabelSkew, FeatureSkew
from fedsweep.data.partition.pooled import Centralized, Iid, LabelSkew

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
