"""Searchers, which choose the next trial for Ray Tune."""
