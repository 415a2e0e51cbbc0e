"""FedAG (Wang et al.): the clients' models and the domain adapters of the server learn from each other."""
