"""Shared modules for configuration, errors, files, paths, process usage, random streams and YAML.

None of these modules imports torch, which is slow to import.
"""
