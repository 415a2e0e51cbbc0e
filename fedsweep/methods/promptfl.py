"""PromptFL: Let Federated Participants Cooperatively Learn Prompts Instead of Models.

Tao Guo, Song Guo, Junxiao Wang, Xueyang Tang, Wenchao Xu. IEEE Transactions on Mobile Computing, 2023. Clients learn
context vectors that precede the class names in the prompts, as in CoOp, and the server averages these vectors. Both
encoders of CLIP stay frozen.
"""

from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import Literal, cast

from pydantic import Field

from fedsweep.common.errors import UserError
from fedsweep.methods.capabilities import ExportObstacle, FrozenEncoders, OwnWeights
from fedsweep.models import BackboneConfig
from fedsweep.models.clip.model import LayeredClip
from fedsweep.models.layered import LayeredModel


class PromptFL(FrozenEncoders, OwnWeights, ExportObstacle):
    """FedAvg on learned context vectors, which precede the class names in CLIP's prompts.

    All classes share the vectors, and both encoders of CLIP stay frozen.
    """

    name: Literal["promptfl"] = "promptfl"
    context: int = Field(
        16,
        gt=0,
        description="number of learned context vectors before a class's name, instead of the words of a prompt",
    )

    def check_weights(self, backbone: BackboneConfig, class_names: Sequence[str]) -> None:
        """Check before a run that the context vectors and the longest class name fit into one prompt.

        Raises:
            UserError: The prompt is too long, or the backbone's weights are missing or do not fit the backbone.
        """
        _check_context(self.context, backbone, tuple(class_names), backbone.fingerprint())

    def prepare(self, model: LayeredModel, depths: Collection[int], domains: Collection[str], seed: int) -> None:
        """Add the trainable context vectors to the model as the tensor `prompt.context`.

        The tensor contains one row for each vector, and its second dimension is the width of the text encoder.
        """
        cast(LayeredClip, model).add_context(self.context, seed)

    def export_obstacle(self, depths: Collection[int], num_layers: int, of_client: bool = False) -> str | None:
        """Return a description of the context vectors, which exported files cannot contain."""
        return "learned vectors before the classes' names"


@lru_cache(maxsize=16)  # because it is called for every arm and seed of a search space
def _check_context(count: int, backbone: BackboneConfig, class_names: tuple[str, ...], _fingerprint: str) -> None:
    model = cast(LayeredClip, backbone.build(len(class_names), 0, class_names))
    try:
        model.add_context(count, 0)
    except UserError as error:
        raise UserError(f"`method.context` {count} is too large: {error}") from None
