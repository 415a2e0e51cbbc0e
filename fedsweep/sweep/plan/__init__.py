"""Plan of a sweep: a search space resolved into checked trials. No Ray."""
