"""Modules that all others use: errors, configuration, YAML, paths, files, random streams, process usage. No torch."""
