"""Preparation of data sets as Arrow files, generation of synthetic images, and figures of data sets."""
