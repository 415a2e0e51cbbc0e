"""Synthetic images of the server. One file per source; this is the list."""

from typing import Annotated

from pydantic import Field

from fedsweep.data.synthetic.base import NoSynthetic, Synthetic
from fedsweep.data.synthetic.diffusers import Diffusers
from fedsweep.data.synthetic.folder import Folder
from fedsweep.data.synthetic.surrogate import Surrogate

SyntheticConfig = Annotated[NoSynthetic | Surrogate | Folder | Diffusers, Field(discriminator="name")]

__all__ = ["Diffusers", "Folder", "NoSynthetic", "Surrogate", "Synthetic", "SyntheticConfig"]
