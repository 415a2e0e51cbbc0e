"""From data sets as their authors ship them to a store of decoded images."""
