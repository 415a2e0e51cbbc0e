"""FedBRICK (Zhang et al.): small modules called BRICKs replace the blocks that a client does not hold."""
