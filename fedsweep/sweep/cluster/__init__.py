"""Ray's machines: joining, checking nodes, sending files, sharing GPUs."""
