"""One federated run: its configuration, its rounds, and its resumable execution."""
