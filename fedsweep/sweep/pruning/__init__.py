"""Which trials, arms and members of a population continue."""
