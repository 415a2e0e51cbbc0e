"""The plan of a sweep: the checked trials of a search space. No module of this package imports ray."""
