"""FedCLIP: Fast Generalization and Personalization for CLIP in Federated Learning.

Wang Lu, Xixu Hu, Jindong Wang, Xing Xie. IEEE Data Engineering Bulletin, 2023. The clients train an adapter, which is
an attention over the features of CLIP's frozen image encoder, and the server averages the adapters.
"""

from collections.abc import Collection
from typing import Literal, cast

from pydantic import Field

from fedsweep.methods.capabilities import ExportObstacle, FrozenEncoders
from fedsweep.models.clip.model import LayeredClip
from fedsweep.models.layered import LayeredModel


class FedCLIP(FrozenEncoders, ExportObstacle):
    """FedAvg on one adapter after CLIP's frozen image encoder.

    The encoder computes the features of each image only once for all rounds.
    """

    name: Literal["fedclip"] = "fedclip"
    hidden: int | None = Field(
        None, gt=0, description="width of the adapter's hidden layer; `null`: width of the features"
    )

    def prepare(self, model: LayeredModel, depths: Collection[int], domains: Collection[str], seed: int) -> None:
        """Add the trainable adapter after the image encoder as the module `image_adapter`."""
        cast(LayeredClip, model).add_image_adapter(self.hidden, seed)

    def export_obstacle(self, depths: Collection[int], num_layers: int, of_client: bool = False) -> str | None:
        """Return a description of the adapter, which exported files cannot contain."""
        return "an adapter after the image encoder"
