"""FedMS (Wu et al.): a global expert, personal experts that grow from the top down, and a gate."""
