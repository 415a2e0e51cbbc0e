"""Preparation of published data sets as Arrow files of decoded images, figures of the data, and generated images."""
