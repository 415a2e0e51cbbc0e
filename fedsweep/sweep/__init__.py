"""Sweeps: sets of runs on Ray Tune. Only this room imports ray and optuna."""

from fedsweep.sweep.running.tune import TuneOptions, tune

__all__ = ["TuneOptions", "tune"]
