"""Classes and functions that load data sets, divide them among clients, and provide the server's synthetic images."""
