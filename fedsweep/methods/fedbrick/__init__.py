"""FedBRICK (Zhang et al.): small modules, BRICKs, replace the blocks that a client does not hold."""
