"""FedAG (Wang et al.): small models on the clients and adapters of the server's CLIP learn from each other."""
