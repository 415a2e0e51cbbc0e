"""The devices of the clients: their computing speeds and bandwidths, for the simulated time of a round."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

from pydantic import Field

from fedsweep.common.config import Config
from fedsweep.federation.client_sizes import of_clients
from fedsweep.training.costs import transmission_seconds
from fedsweep.types import ClientId


class DeviceProfile(Config):
    """The speeds of a device. A megabyte is 10^6 bytes."""

    flops_per_second: float = Field(gt=0, description="FLOPs per second that training sustains")
    megabytes_per_second_up: float = Field(gt=0, description="bandwidth to the server")
    megabytes_per_second_down: float = Field(gt=0, description="bandwidth from the server")

    def seconds(self, bytes_down: int, flops: int, bytes_up: int) -> float:
        """Return the time of a client's round in seconds: download, training and upload, one after the other.

        Args:
            bytes_down: The number of bytes that the client receives.
            flops: The number of FLOPs of its training.
            bytes_up: The number of bytes that the client sends.

        >>> DeviceProfile(flops_per_second=1e9, megabytes_per_second_up=1, megabytes_per_second_down=2).seconds(
        ...     4_000_000, 3_000_000_000, 500_000
        ... )
        5.5
        """
        down = transmission_seconds(bytes_down, self.megabytes_per_second_down)
        return down + flops / self.flops_per_second + transmission_seconds(bytes_up, self.megabytes_per_second_up)


PROFILES: Mapping[str, DeviceProfile] = {
    "phone": DeviceProfile(flops_per_second=5e10, megabytes_per_second_up=1.5, megabytes_per_second_down=6),
    "laptop": DeviceProfile(flops_per_second=3e11, megabytes_per_second_up=6, megabytes_per_second_down=12),
    "jetson": DeviceProfile(flops_per_second=2e12, megabytes_per_second_up=100, megabytes_per_second_down=100),
}
"""The profiles that can be given by name. docs/concepts/metrics.md names the sources of these round numbers."""
ProfileName = Literal["phone", "laptop", "jetson"]
"""The keys of `PROFILES`."""
Devices = Literal["none"] | Annotated[tuple[ProfileName | DeviceProfile, ...], Field(min_length=1)]
"""The profiles of the clients, as `federation.depths` lists depths; `none`: no time is simulated."""


def devices_of(
    devices: Devices, clients: Mapping[ClientId, str], domains: Sequence[str]
) -> dict[ClientId, DeviceProfile]:
    """Return the device of each client, keyed by client id; empty if `devices` is `none`.

    Args:
        devices: One profile for each client, one for each domain, or one for all clients.
        clients: The domain of each client, keyed by client id.
        domains: The domains of the clients, in the order in which `devices` lists them; empty if clients have images of
            several domains.

    Raises:
        ValueError: The length of `devices` is none of the allowed ones.
    """
    if devices == "none":
        return {}
    given = of_clients("devices", devices, clients, domains)
    return {client: PROFILES[one] if isinstance(one, str) else one for client, one in given.items()}
