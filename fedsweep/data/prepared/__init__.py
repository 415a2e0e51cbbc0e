"""Decoded images on disk: one folder per data set and size, one Arrow file per domain.

    data/pacs-64/
      card.json              name, size, classes, counts, digest; written last
      art_painting.arrow     columns image (tensor of uint8, 3 x size x size), label, path; two record batches

The first record batch holds the training images, the second the test images, each in one piece. So a memory map of the
file is the tensor: nothing is decoded or copied, and all processes of a machine share its pages.
"""
