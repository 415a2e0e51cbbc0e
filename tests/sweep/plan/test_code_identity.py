"""The imports of a run, which are limited to the packages in the digest of the code and to torch."""

import subprocess
import sys

from fedsweep.sweep.plan.plan import ENGINE
from tests.test_layers import HEAVY


def test_a_run_imports_only_the_packages_of_the_digest_and_results_and_torch():
    """Every worker imports these modules; with scikit-learn, its start would take a second longer."""
    run = "fedsweep.federation.build_and_run, fedsweep.results.checkpoint, fedsweep.data.data_config as data"
    code = f"import sys, {run}; data.load(data.DigitsData()); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    names = done.stdout.split()
    assert {*HEAVY} & {*names} == {"torch"}
    modules = [name for name in names if name.startswith("fedsweep.")]
    rooms = {name.split(".")[1] for name in modules}
    assert rooms == {*ENGINE, "types", "results"}
    assert len(modules) > 60
