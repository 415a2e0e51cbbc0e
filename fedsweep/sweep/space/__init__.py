"""Search spaces and the YAML files that define them. Nothing here imports ray."""
