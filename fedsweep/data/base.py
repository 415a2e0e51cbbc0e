"""What every kind of data set says of its domains before an image is read."""

from typing import Self

from pydantic import Field, model_validator

from fedsweep.common.config import Config


class Data(Config):
    """The base of their records."""

    domains: tuple[str, ...] = Field(min_length=1, description="domains, in the order of the clients' depths")
    held_out_domains: tuple[str, ...] = Field(
        (), description="those of `data.domains` that no client has, for testing out of domain; [] for none"
    )

    @model_validator(mode="after")
    def _domains_fit(self) -> Self:
        for field in ("domains", "held_out_domains"):
            names = getattr(self, field)
            if len(set(names)) < len(names):
                raise ValueError(f"`data.{field}` must not repeat a domain, but is {list(names)}")
        for name in self.held_out_domains:
            if name not in self.domains:
                raise ValueError(
                    f"`data.held_out_domains` must be among `data.domains`, {', '.join(self.domains)}, "
                    f"but one is `{name}`"
                )
        if not self.training_domains:
            raise ValueError(
                f"`data.held_out_domains` must leave a domain to train on, but it names all {len(self.domains)}"
            )
        return self

    @property
    def training_domains(self) -> tuple[str, ...]:
        """Domains whose images clients have."""
        return tuple(name for name in self.domains if name not in self.held_out_domains)
