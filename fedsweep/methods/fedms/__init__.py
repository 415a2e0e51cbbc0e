"""FedMS (Wu et al.): a global expert, a local expert for each client, and a gate that mixes the two experts."""
