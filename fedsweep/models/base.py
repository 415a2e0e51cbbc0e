"""What every kind of backbone says of itself before it has tensors."""

from typing import ClassVar, Literal

from pydantic import Field, field_validator

from fedsweep.common.config import Config
from fedsweep.common.yaml_values import Json

SHAPE = (
    "img_size",
    "in_chans",
    "patch_size",
    "embed_dim",
    "depth",
    "num_blocks",
    "num_heads",
    "mlp_ratio",
    "num_classes",
)


class Recipe(Config):
    """How a backbone's own library builds the same network, without fedsweep."""

    what_a_name_is = "an entry of a backbone's recipe"

    call: Literal["timm.create_model", "timm.models.MlpMixer", "transformers.CLIPModel.from_pretrained"]
    model: str = Field("", description="the name that it is called with; empty where it takes none")
    arguments: dict[str, Json] = Field(default_factory=dict, description="the others, by name")
    fetched: bool = Field(description="whether the library has the weights by that name, or can fetch them")

    @field_validator("arguments")
    @classmethod
    def _of_the_shape(cls, arguments: dict[str, Json]) -> dict[str, Json]:
        for name in arguments:
            if name not in SHAPE:  # timm's others name files and addresses
                raise ValueError(f"`arguments` of a backbone's recipe must be among {', '.join(SHAPE)}, not `{name}`")
        return arguments

    @property
    def of_timm(self) -> bool:
        """Whether it is timm's, else transformers'."""
        return self.call.startswith("timm.")


class Backbone(Config):
    """The base of their records: what a method or an option may ask for."""

    has_head: ClassVar[bool] = True
    """Whether a linear classifier is trained beside the adapters."""
    has_text: ClassVar[bool] = False
    """Whether there is a text encoder."""
    positions: ClassVar[tuple[str, ...]] = ("l0", "l1", "both")
    """Where adapters can sit."""

    def identity(self, content: str) -> str:
        """What decides what it makes of an image, with the fingerprint of its weights; no texts."""
        return f"{self.model_dump_json(exclude={'prompt'})} {content}"
