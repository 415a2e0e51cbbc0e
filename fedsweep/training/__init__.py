"""One round of a run: local training, optimizers, aggregation, evaluation, costs, attacks and drift."""
