"""Errors, configuration records, YAML, paths, files and locks, random streams and process usage. No torch."""
