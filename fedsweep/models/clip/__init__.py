"""CLIP backbones, which run both encoders block by block, and their weights."""
