"""Preparation of published data sets: decoding into a store of Arrow files, figures, and generated images."""
