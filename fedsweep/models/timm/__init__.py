"""timm backbones that run block by block, with their weights."""
