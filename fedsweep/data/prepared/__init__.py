"""Decoded images on disk: a folder per data set and size, with `card.json`, written last, and an Arrow file per domain.

A file has the columns image (tensor of uint8, 3 x size x size), label and path, and two record batches: the training
images, then the test images, each in one piece. So a memory map of the file is the tensor: nothing is decoded or
copied, and all processes of a machine share its pages.
"""
