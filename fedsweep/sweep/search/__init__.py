"""Which trial Ray Tune runs next."""
