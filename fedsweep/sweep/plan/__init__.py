"""The plan of a sweep: the checked trials of a search space. Nothing here imports ray."""
