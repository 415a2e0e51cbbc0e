"""Search spaces and the YAML files that define them. No module of this package imports ray."""
