"""timm's image backbones as layered models, with their weights."""
