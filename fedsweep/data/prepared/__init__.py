"""Prepared data sets, that is, decoded images on disk, with one folder per data set and image size.

A folder contains one Arrow file per domain and `card.json`, which describes the data set and is written last. Each
Arrow file has the columns image (a uint8 tensor, 3 x size x size), label and path, and has two record batches. The
first batch contains the training images, and the second batch contains the test images.

The pixels of a batch are contiguous, so a memory map of the file can be used as a tensor. Therefore, images are neither
decoded nor copied when they are loaded, and all processes on a machine share the same memory.
"""
