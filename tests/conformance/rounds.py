"""A function that runs one round of a federation, from `fedsweep.testing`."""

from fedsweep.testing.rounds import one_round

__all__ = ["one_round"]
