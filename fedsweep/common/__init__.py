"""Shared modules for configuration, errors, files, paths, the resource usage of processes, random streams and YAML.

None of these modules imports torch, which is slow to import.
"""
