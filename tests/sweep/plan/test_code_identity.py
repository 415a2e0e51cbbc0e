"""What a run imports: the rooms of the code's digest, and of the heavy libraries torch alone."""

import subprocess
import sys

from fedsweep.sweep.plan.plan import ENGINE
from tests.test_layers import HEAVY


def test_a_run_of_the_embedded_data_imports_the_rooms_of_the_digest_results_which_only_stores_and_torch_alone():
    """Every worker imports this, and would be a second later with scikit-learn."""
    run = "fedsweep.federation.build_and_run, fedsweep.results.checkpoint, fedsweep.data.data_config as data"
    code = f"import sys, {run}; data.load(data.DigitsData()); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    names = done.stdout.split()
    assert {*HEAVY} & {*names} == {"torch"}
    modules = [name for name in names if name.startswith("fedsweep.")]
    rooms = {name.split(".")[1] for name in modules}
    assert rooms == {*ENGINE, "types", "results"}
    assert len(modules) > 60
