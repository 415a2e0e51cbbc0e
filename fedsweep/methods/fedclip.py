"""FedCLIP: Fast Generalization and Personalization for CLIP in Federated Learning.

Wang Lu, Xixu Hu, Jindong Wang, Xing Xie. IEEE Data Engineering Bulletin, 2023. An attention over the features of the
frozen image encoder is trained on the clients and averaged.
"""

from collections.abc import Collection
from typing import Literal, cast

from pydantic import Field

from fedsweep.methods.capabilities import ExportObstacle, FrozenEncoders
from fedsweep.models.clip.model import LayeredClip
from fedsweep.models.layered import LayeredModel


class FedCLIP(FrozenEncoders, ExportObstacle):
    """FedAvg on one adapter after CLIP's image encoder; an image is encoded once for all rounds."""

    name: Literal["fedclip"] = "fedclip"
    hidden: int | None = Field(None, gt=0, description="width between the adapter's two MLPs; null: the features'")

    def prepare(self, model: LayeredModel, depths: Collection[int], domains: Collection[str], seed: int) -> None:
        """Add the adapter, as `image_adapter`."""
        cast(LayeredClip, model).add_image_adapter(self.hidden, seed)

    def export_obstacle(self, depths: Collection[int], num_layers: int, of_client: bool = False) -> str | None:
        """Return the adapter."""
        return "an attention behind the image encoder"
