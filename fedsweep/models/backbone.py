"""What every kind of backbone says of itself before it has tensors."""

from typing import ClassVar

from fedsweep.config import Config


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
