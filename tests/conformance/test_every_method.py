"""The list of methods; the properties of every method are tested in `fedsweep/testing/test_methods.py`."""

import importlib
from pathlib import Path

import fedsweep.methods
from fedsweep.methods import BUILT_IN
from fedsweep.methods.base import FederatedMethod
from fedsweep.methods.capabilities import FrozenEncoders
from fedsweep.testing.cases import METHODS


def test_the_list_contains_every_method_of_every_file():
    package = Path(fedsweep.methods.__file__).parent
    for path in package.rglob("*.py"):
        importlib.import_module("fedsweep.methods." + ".".join(path.relative_to(package).with_suffix("").parts))
    below = {one for base in (FederatedMethod, FrozenEncoders) for one in base.__subclasses__()} - {FrozenEncoders}
    written = {one for one in below if one.__module__.startswith("fedsweep.")}
    assert set(BUILT_IN) == written
    assert {method["name"] for method in METHODS} >= {one.model_fields["name"].default for one in BUILT_IN}
    assert len(BUILT_IN) >= 14
