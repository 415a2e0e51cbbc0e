"""An example of a package that extends fedsweep: a method, a data source, an aggregation rule and a metric."""
