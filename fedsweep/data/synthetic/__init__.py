"""Sources of the server's synthetic images."""
