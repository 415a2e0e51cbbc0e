"""FedBRICK (Zhang et al.): small modules in place of the blocks that a client does not hold."""
