"""One federated run: its configuration, its rounds, and running it so that it can be resumed."""
