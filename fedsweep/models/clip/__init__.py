"""CLIP backbones: the model that runs both encoders block by block, and its weights."""
