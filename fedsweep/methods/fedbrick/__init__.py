"""FedBRICK (Zhang et al.): small modules replace the blocks that a client does not hold."""
