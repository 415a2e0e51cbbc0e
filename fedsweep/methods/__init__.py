"""The list of all methods: those of fedsweep, and those of other installed packages.

To add a method without changing fedsweep, write its class in a package of your own, and declare the class as an entry
point in the group `fedsweep.methods` (docs/guides/your_own_method.md). To add a method to fedsweep itself, write its
module, import its class here, and add the class to `AnyMethod`.
"""

from functools import cache, reduce
from operator import or_
from typing import TYPE_CHECKING, Annotated, Any, get_args

from pydantic import Field

from fedsweep.common import plugins
from fedsweep.common.errors import UserError
from fedsweep.methods.base import FederatedMethod, Server
from fedsweep.methods.bounds import AllLarge, AllSmall
from fedsweep.methods.depthfl import DepthFL
from fedsweep.methods.fedag.method import FedAG
from fedsweep.methods.fedbrick.method import FedBRICK
from fedsweep.methods.fedclip import FedCLIP
from fedsweep.methods.fedex_lora import FedExLoRA
from fedsweep.methods.fedms.method import FedMS
from fedsweep.methods.fedot import FedOT
from fedsweep.methods.fedra import FedRA
from fedsweep.methods.fedsa_lora import FedSALoRA
from fedsweep.methods.flexlora import FlexLoRA
from fedsweep.methods.flora import FLoRA
from fedsweep.methods.ft import FT, LFFT
from fedsweep.methods.hetlora import HetLoRA
from fedsweep.methods.inclusivefl import InclusiveFL
from fedsweep.methods.promptfl import PromptFL
from fedsweep.methods.raflora import RaFLoRA
from fedsweep.methods.rolora import RoLoRA
from fedsweep.methods.zero_shot import ZeroShot

AnyMethod = (
    FedRA
    | AllLarge
    | AllSmall
    | InclusiveFL
    | DepthFL
    | FedBRICK
    | FedMS
    | FT
    | LFFT
    | PromptFL
    | FedAG
    | FedCLIP
    | FedOT
    | ZeroShot
    | HetLoRA
    | FlexLoRA
    | RaFLoRA
    | FLoRA
    | FedExLoRA
    | RoLoRA
    | FedSALoRA
)
BUILT_IN: tuple[type[FederatedMethod], ...] = get_args(AnyMethod)

if TYPE_CHECKING:
    MethodConfig = Annotated[AnyMethod, Field(discriminator="name")]
    ALL: tuple[type[FederatedMethod], ...]


def __getattr__(name: str) -> Any:
    """Return `ALL`, the list of all methods, or `MethodConfig`, the type of a method in a configuration.

    The plug-ins are imported when one of the two is first used, and not with this module, because the modules of
    plug-ins import `fedsweep.methods.base`.

    Raises:
        UserError: The entry point of a plug-in is broken.
    """
    if name == "ALL":
        return _all()
    if name == "MethodConfig":
        return Annotated[reduce(or_, _all()), Field(discriminator="name")]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@cache
def _all() -> tuple[type[FederatedMethod], ...]:
    return (*BUILT_IN, *plugins.load("methods", FederatedMethod, map(plugins.name_of, BUILT_IN)))


def usable() -> tuple[tuple[type[FederatedMethod], ...], tuple[UserError, ...]]:
    """Return all methods except those of broken plug-ins, and the errors about the broken plug-ins."""
    broken: list[UserError] = []
    loaded = plugins.load("methods", FederatedMethod, map(plugins.name_of, BUILT_IN), broken=broken)
    return (*BUILT_IN, *loaded), tuple(broken)


__all__ = ["ALL", "BUILT_IN", "AnyMethod", "FederatedMethod", "MethodConfig", "Server", "usable"]
