"""A sweep that runs: its folder, Ray Tune, records, live table and end."""
