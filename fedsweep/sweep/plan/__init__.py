"""The plan of a sweep, which lists the trials of a validated search space. No module of this package imports ray."""
