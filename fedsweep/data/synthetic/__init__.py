"""Sources of the server's synthetic images."""

from typing import Annotated

from pydantic import Field

from fedsweep.data.synthetic.generated import Diffusers, Folder, NoSynthetic, Synthetic
from fedsweep.data.synthetic.surrogate import Surrogate

SyntheticConfig = Annotated[NoSynthetic | Surrogate | Folder | Diffusers, Field(discriminator="name")]

__all__ = ["Diffusers", "Folder", "NoSynthetic", "Surrogate", "Synthetic", "SyntheticConfig"]
