"""Functions that prepare data sets as Arrow files, generate synthetic images and draw figures of data sets."""
