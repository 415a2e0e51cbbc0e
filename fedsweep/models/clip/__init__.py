"""CLIP backbones with their weights; both encoders run block by block."""
