"""Machines of a sweep: joining a Ray cluster, checking nodes, delivering files, sharing GPUs."""
