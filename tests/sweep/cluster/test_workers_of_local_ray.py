"""The workers that start together with Ray on this machine."""

import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

RESERVED = """
import json, os, time
import psutil, ray
from rich.console import Console
from fedsweep.sweep.cluster.local_ray import begun
from fedsweep.sweep.space.settings import Resources

def workers():
    return [one.pid for one in psutil.Process().children(recursive=True) if one.name().startswith("ray::IDLE")]

with begun(Console(quiet=True), Resources(cpus_per_trial=1), at_once=2) as starting:
    starting.wait()
    early = workers()
    cpus = int(ray.available_resources()["CPU"])
    group = ray.util.placement_group([{"CPU": 1}] * cpus)
    ray.get(group.ready())
    time.sleep(3)  # Ray Tune may take this long until it asks for a worker, on a busy machine
    kept = workers()

    class Trial:
        def is_ready(self):
            import sys
            return "peft" in sys.modules

    strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(group)
    trial = ray.remote(Trial).options(num_cpus=1, scheduling_strategy=strategy).remote()
    print(json.dumps([early, kept, ray.get(trial.is_ready.remote())]))
"""


def test_a_worker_that_has_started_with_ray_waits_for_its_first_trial() -> None:
    """Ray's default is to stop such workers one second after all CPUs are reserved."""
    command, environment = [sys.executable, "-c", RESERVED], os.environ | {"RAY_worker_niceness": "0"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    early, kept, imported = json.loads(done.stdout.splitlines()[-1])
    assert early
    assert kept == early
    assert imported
