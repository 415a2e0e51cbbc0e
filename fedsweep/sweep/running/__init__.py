"""Modules that execute a sweep: they open its folder, run its trials on Ray Tune, and write its results and report."""
