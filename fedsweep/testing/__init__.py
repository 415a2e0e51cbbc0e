"""Conformance tests: properties that every method, data source, aggregation rule and metric must have.

They also run on the classes of plug-ins, which are other installed packages that extend fedsweep. For example, this
command tests the method `fedprox_a`. It needs pytest.

    python -m fedsweep.testing --method fedprox_a

The module `cases` contains the hyperparameters of the test cases, and `fixtures` contains the small run of the tests.
"""

KINDS = {
    "method": (("test_methods", "test_allocations", "test_ranks"), "a method, as in YAML files"),
    "data": (("test_data",), "a data source, as in `data.name`"),
    "aggregation": (("test_aggregation",), "an aggregation rule, as in `aggregation.rule`"),
    "metric": (("test_metrics",), "a metric, as in `evaluation.metrics`"),
}
"""The modules that test each kind of class, and a description of its name, by option."""
