"""CLIP backbones whose encoders run block by block, with their weights."""
