"""Data sets in memory, partitions into clients, synthetic images, and prepared images on disk."""
