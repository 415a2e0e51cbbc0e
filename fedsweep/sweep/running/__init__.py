"""Execution of a sweep: its folder, Ray Tune, recording, live table and report."""
