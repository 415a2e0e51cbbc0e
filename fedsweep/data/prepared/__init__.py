"""The store of decoded images on disk, without torch: one folder per data set and size, one Arrow file per domain.

    data/pacs-64/
      card.json              what, size, classes, counts, digest; written last
      art_painting.arrow     columns image (tensor of uint8, 3 x size x size), label, path; two record batches

The first record batch of a domain's file holds its training images, the second its test images, each in one piece, so
that a memory map of the file *is* the tensor: nothing is decoded or copied, and all processes of a machine share pages.
"""
