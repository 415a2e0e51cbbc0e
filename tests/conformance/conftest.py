"""Fixtures that run tests on every listed method, and on FedBRICK over each depth method, from `fedsweep.testing`."""

from fedsweep.testing.cases import SMALL_GATE, SMALL_SERVER, method_of
from fedsweep.testing.conftest import chosen, name, pytest_generate_tests

__all__ = ["SMALL_GATE", "SMALL_SERVER", "chosen", "method_of", "name", "pytest_generate_tests"]
