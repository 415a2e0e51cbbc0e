"""The time that other simulators of federated learning add to a bare loop."""
