"""Data sets, their partition among clients, and the synthetic images of the server."""
