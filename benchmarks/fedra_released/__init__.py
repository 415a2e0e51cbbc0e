"""A comparison of FedRA's released code with fedsweep; see `__main__`."""
