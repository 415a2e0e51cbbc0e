"""Sweeps, which are sets of federated runs on Ray Tune.

No other package of fedsweep imports ray.
"""

from fedsweep.sweep.running.tune import TuneOptions, tune

__all__ = ["TuneOptions", "tune"]
