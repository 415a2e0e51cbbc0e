"""The command-line options of the conformance tests, as a plugin of pytest."""

import pytest

from fedsweep.testing import KINDS


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add an option for each kind of class, and an option that changes the experiment of the tests."""
    group = parser.getgroup("fedsweep", "conformance tests of fedsweep")
    for kind, (_, words) in KINDS.items():
        group.addoption(f"--{kind}", action="append", metavar="NAME", help=f"test {words}")
    group.addoption(
        "--set", action="append", metavar="NAME=VALUE", help="a hyperparameter of the tested run, as in method.mu=0.1"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marker of the cases that fedsweep's own default tests leave out."""
    config.addinivalue_line("markers", "slow: takes as long as several other cases")
