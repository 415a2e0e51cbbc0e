"""The formats of a report: data frame, LaTeX, HTML page and terminal text."""
