"""A data source of another installed package."""

from functools import reduce
from operator import or_
from typing import Annotated, Any

import pytest
from pydantic import Field, create_model

from fedsweep.common.errors import UserError
from fedsweep.data.data_config import BUILT_IN, data_sources, load
from fedsweep.federation.build_and_run import content_digests, run
from fedsweep.federation.run_config import RunConfig
from tests.plugin_packages import Install, install

__all__ = ["install"]
SQUARES = '''
from typing import Literal

import torch

from fedsweep.common.rules import known_domains_fit
from fedsweep.data.prepared.dataset import Data, content_digest
from fedsweep.types import Domain, FederatedData, ImageSet


class Squares(Data):
    """Images of one grey level for each class."""

    name: Literal["squares"] = "squares"
    domains: tuple[str, ...] = ("light", "dark")

    @property
    def size(self):
        return 16

    def _violations(self):
        return known_domains_fit(self)

    def load(self):
        labels = torch.arange(40) % 10
        found = []
        for name in self.domains:
            levels = 10 * labels + (100 if name == "light" else 0)
            images = levels.to(torch.uint8).view(-1, 1, 1, 1).expand(-1, 3, 16, 16).contiguous()
            found.append(Domain(name, ImageSet(images[:30], labels[:30]), ImageSet(images[30:], labels[30:])))
        clients = tuple(one for one in found if one.name in self.training_domains)
        held_out = tuple(one for one in found if one.name in self.held_out_domains)
        classes = tuple("0123456789")
        return FederatedData("squares", classes, clients, content_digest(classes, found), held_out)
'''
POINT = {"data": {"squares": "odd_package:Squares"}}


@pytest.fixture
def config(install: Install, tiny: RunConfig) -> RunConfig:
    """Return a small experiment whose images come from the source `squares`."""
    install(SQUARES, POINT)
    kinds = Annotated[reduce(or_, data_sources()), Field(discriminator="name")]
    extended: Any = create_model("RunConfig", __base__=RunConfig, data=(kinds, ...))
    values = {**tiny.model_dump(mode="json"), "data": "squares"}
    values["federation"] |= {"depths": [12, 3], "rounds": 1}
    read: RunConfig = extended.of(values, "mine")
    return read


def test_a_run_reads_the_images_of_another_package(config: RunConfig) -> None:
    assert data_sources()[: len(BUILT_IN)] == BUILT_IN
    untuned, first = run(config)
    assert {"accuracy/domain/light", "accuracy/domain/dark"} < set(first.metrics)
    assert first.metrics["evaluation/images"] == untuned.metrics["evaluation/images"] == 20
    assert content_digests(config)["plugins"].startswith("odd-package 0.1 (code ")
    assert config.marks()["plugins"] == content_digests(config)["plugins"]


def test_validation_images_and_held_out_domains_of_another_package(config: RunConfig) -> None:
    held_out = config.data.model_copy(update={"held_out_domains": ("dark",), "validation_fraction": 0.5})
    data = load(held_out)
    (light,) = data.domains
    assert light.validation is not None
    assert len(light.validation) == len(light.train) == 15
    assert [one.name for one in data.held_out] == ["dark"]
    with pytest.raises(UserError, match=r"`data.domains` must be among light, dark, but one is `grey`"):
        type(config.data).of({"name": "squares", "domains": ["grey"]}, "mine")


def test_an_entry_point_without_a_loader_is_reported(install: Install) -> None:
    install(SQUARES.replace("def load", "def read"), POINT)
    required = "must name a class that inherits from fedsweep.data.prepared.dataset.Data and defines `load`"
    with pytest.raises(UserError, match=rf"`squares` in group fedsweep.data .* {required}"):
        data_sources()
