"""One file per layout."""
