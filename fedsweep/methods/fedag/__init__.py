"""FedAG (Wang et al.): the clients' small models and a CLIP model with adapters on the server learn from each other."""
