"""Federated runs: their configuration, communication rounds and execution with checkpoints."""
