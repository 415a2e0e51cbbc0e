"""A run of two rounds on the embedded digits, and its export."""

from pathlib import Path

import pytest

from fedsweep.common.yaml_values import read_yaml
from fedsweep.export.which_trial import Named
from fedsweep.export.write import export
from fedsweep.federation.run_config import RunConfig
from fedsweep.results import Store
from tests.export.helpers import play

EXPERIMENT = Path(__file__).parents[2] / "experiments" / "fedra_digits.yaml"

SMALL = {
    "federation.rounds": 2,
    "federation.depths": [12, 6],
    "data.domains": ["plain", "inverted"],
    "data.test_fraction": 0.05,
    "local.steps": 4,
    "local.batch_size": 8,
    "lora.rank": 2,
}


@pytest.fixture(scope="package")
def small() -> RunConfig:
    """Return the configuration of a run of two rounds on the embedded digits."""
    return RunConfig.of(read_yaml(EXPERIMENT), "test").override(SMALL, "test")


@pytest.fixture(scope="package")
def run(small: RunConfig, tmp_path_factory: pytest.TempPathFactory) -> Named:
    """Run and record the configuration of the fixture `small`."""
    return play(Store(tmp_path_factory.mktemp("mlruns")), "fedra_digits", small)


@pytest.fixture(scope="package")
def exported(run: Named, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Export the run, and return the export's folder, which tests must not change."""
    folder = tmp_path_factory.mktemp("exports") / "digits"
    export(run, folder)
    return folder
