"""One federated run: its configuration, its communication rounds, and its execution with checkpoints."""
