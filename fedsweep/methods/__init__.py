"""The list of all methods.

To add a method, write its module, import its class here, and add the class to `AnyMethod`.
"""

from typing import Annotated, get_args

from pydantic import Field

from fedsweep.methods.base import FederatedMethod, Server
from fedsweep.methods.bounds import AllLarge, AllSmall
from fedsweep.methods.depthfl import DepthFL
from fedsweep.methods.fedag.method import FedAG
from fedsweep.methods.fedbrick.method import FedBRICK
from fedsweep.methods.fedclip import FedCLIP
from fedsweep.methods.fedms.method import FedMS
from fedsweep.methods.fedot import FedOT
from fedsweep.methods.fedra import FedRA
from fedsweep.methods.ft import FT, LFFT
from fedsweep.methods.inclusivefl import InclusiveFL
from fedsweep.methods.promptfl import PromptFL
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
)
MethodConfig = Annotated[AnyMethod, Field(discriminator="name")]
ALL: tuple[type[FederatedMethod], ...] = get_args(AnyMethod)

__all__ = ["ALL", "AnyMethod", "FederatedMethod", "MethodConfig", "Server"]
