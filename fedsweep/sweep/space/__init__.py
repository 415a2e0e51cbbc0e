"""Search spaces as YAML files describe them. No Ray."""
