"""The machines of a sweep: joining a Ray cluster, checking its nodes, delivering files and sharing GPUs."""
