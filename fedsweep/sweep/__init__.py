"""Sets of runs on Ray Tune. The only room for ray and optuna."""

from fedsweep.sweep.running.tune import TuneOptions, tune

__all__ = ["TuneOptions", "tune"]
