"""From a search space to checked, keyed trials. No Ray."""
