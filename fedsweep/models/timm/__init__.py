"""timm backbones with their weights, which run block by block."""
