"""The execution of a sweep: its folder, Ray Tune, the recording of results, the live table and the report."""
