"""FedAG (Wang et al.): client models and a server of domain adapters that learn from each other."""
