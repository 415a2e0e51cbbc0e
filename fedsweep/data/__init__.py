"""Data sets in memory, their partition into clients, synthetic images, prepared images on disk."""
