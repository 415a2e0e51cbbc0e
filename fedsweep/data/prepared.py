"""A data set that `fedsweep data prepare` has put on disk, mapped into memory."""

import hashlib
from typing import Literal

from pydantic import Field, field_validator

from fedsweep.config import Config
from fedsweep.data.imagestore import CARD, read_card, read_domain, store_folder
from fedsweep.errors import UserError, near
from fedsweep.paths import data_folder
from fedsweep.types import FederatedData


class PreparedData(Config):
    """Images on disk, decoded once by `fedsweep data prepare`; all trials of a machine share one memory map."""

    name: Literal["prepared"] = "prepared"
    set: str = Field(min_length=1, description="name that the data set was prepared under, e.g. `pacs`")
    size: int = Field(224, gt=0, description="height and width of its images, pixels")
    domains: tuple[str, ...] = Field(min_length=1, description="domains, in the order of the clients' depths")
    digest: str | None = Field(None, min_length=8, description="first digits of its content's SHA-256; null for any")

    @field_validator("domains")
    @classmethod
    def _different(cls, domains: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(domains)) < len(domains):
            raise ValueError(f"`data.domains` must not repeat a domain, but is {list(domains)}")
        return domains

    def load(self) -> FederatedData:
        """Map the domains into memory.

        Raises:
            UserError: the set is not prepared at this size, is damaged, has other content, or lacks a domain.
        """
        folder = store_folder(self.set, self.size)
        if not (folder / CARD).exists():
            raise UserError(self._missing())
        card = read_card(folder)
        if self.digest is not None and not card.digest.startswith(self.digest.lower()):
            raise UserError(
                f"`data.digest` must be that of {folder}, {card.digest[:12]}, but it is {self.digest}; "
                "its images or labels are others."
            )
        for name in self.domains:
            if name not in card.domains:
                has = f"; it has {', '.join(card.domains)}."
                raise UserError(f"`data.domains`: {self.set} has no domain `{name}`{near(name, card.domains) or has}")
        domains = tuple(read_domain(folder / f"{name}.arrow", name) for name in self.domains)
        digest = hashlib.sha256("\0".join([card.digest, *self.domains]).encode()).hexdigest()
        return FederatedData(self.set, card.class_names, domains, digest)

    def _missing(self) -> str:
        """Why there is nothing to load, and the command that mends it."""
        command = f"`fedsweep data prepare {self.set} --root DIR --size {self.size}`"
        cards = sorted(data_folder().glob(f"*/{CARD}"))
        sizes = [path.parent.name.rpartition("-")[2] for path in cards if path.parent.name.startswith(f"{self.set}-")]
        sizes = [size for size in sizes if size.isdigit() and store_folder(self.set, int(size)).is_dir()]
        if sizes:
            return (
                f"`data.size` is {self.size}, but {self.set} is prepared at {' and '.join(sizes)} pixels; "
                f"{command} would make it."
            )
        names = [path.parent.name.rpartition("-")[0] for path in cards]
        hint = near(self.set, names) or f"; {command} would make it."
        return f"`data.set`: there is no prepared data set `{self.set}` in {data_folder()}{hint}"
