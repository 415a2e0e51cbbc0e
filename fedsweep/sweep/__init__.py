"""Sweeps, which are sets of federated runs on Ray Tune. Only this package imports ray and optuna."""

from fedsweep.sweep.running.tune import TuneOptions, tune

__all__ = ["TuneOptions", "tune"]
