"""The parts of a training round: local training, optimizers, aggregation, evaluation, costs, attacks and drift."""
