"""Data sets as decoded images in memory, by domain."""
