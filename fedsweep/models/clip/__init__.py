"""CLIP backbones, whose encoders run block by block, and the loading of their weights."""
