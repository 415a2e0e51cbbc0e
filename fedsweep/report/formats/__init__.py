"""A report as data frame, LaTeX, HTML page and terminal text."""
