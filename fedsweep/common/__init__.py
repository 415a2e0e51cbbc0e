"""Modules for configuration, errors, files, paths, process usage, random streams and YAML, used by all others.

None of these modules imports torch, which is slow to import.
"""
