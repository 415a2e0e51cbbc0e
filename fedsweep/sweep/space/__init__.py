"""Search spaces, as described by YAML files. No Ray."""
