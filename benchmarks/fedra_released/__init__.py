"""FedRA's released code beside fedsweep; see `__main__`."""
