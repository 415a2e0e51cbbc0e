"""Prepared data sets, that is, decoded images on disk, with one folder per data set and image size.

A folder contains an Arrow file for each domain and `card.json`, which describes the data set and is written last. An
Arrow file has the columns image (a uint8 tensor, 3 x size x size), label and path. The first of its two record batches
contains the training images, and the second contains the test images. The pixels of a batch are contiguous, so a memory
map of the file can be used as a tensor. Images are not decoded or copied when they are loaded, and all processes on a
machine share the memory.
"""
