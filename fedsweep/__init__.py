"""fedsweep: hyperparameter tuning and ablations for federated fine-tuning of foundation models."""

__version__ = "0.1.0"
