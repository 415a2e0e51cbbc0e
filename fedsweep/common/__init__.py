"""Basic modules that all others use, such as errors, configuration, YAML, paths and random streams.

None of them imports torch.
"""
