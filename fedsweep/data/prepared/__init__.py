"""Prepared data sets: decoded images on disk, in a folder for each data set and image size.

A folder contains an Arrow file for each domain and `card.json`, which describes the data set and is written last. An
Arrow file has the columns image (a uint8 tensor, 3 x size x size), label and path. It contains two record batches: the
training images, then the test images. The pixels of a batch are contiguous, so that a memory map of the file serves as
the tensor. Nothing is decoded or copied, and all processes of a machine share the memory.
"""
