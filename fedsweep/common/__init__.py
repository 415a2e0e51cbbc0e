"""Modules that all other modules use: configuration, errors, files, paths, process usage, random streams and YAML.

None of these modules imports torch, whose import is slow.
"""
