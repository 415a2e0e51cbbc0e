"""Every method that is listed, one after the other."""

import pytest

from fedsweep.methods import ALL, FederatedMethod


@pytest.fixture(params=ALL, ids=lambda method: method.model_fields["name"].default)
def method(request: pytest.FixtureRequest) -> type[FederatedMethod]:
    return request.param


@pytest.fixture
def name(method: type[FederatedMethod]) -> str:
    return method.model_fields["name"].default
