"""The rooms of the code's digest are those that a run imports."""

import subprocess
import sys

from fedsweep.sweep.plan.code_identity import ENGINE

MODULES = "[name for name in sys.modules if name.startswith('fedsweep.')]"


def test_a_run_imports_the_rooms_of_the_digest_and_results_which_only_stores():
    code = f"import sys, fedsweep.federation.build_and_run; print(*{MODULES})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    modules = done.stdout.split()
    rooms = {name.split(".")[1] for name in modules}
    assert rooms == {*ENGINE, "types", "results"}
    assert len(modules) > 60
