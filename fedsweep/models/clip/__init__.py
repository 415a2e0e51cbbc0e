"""CLIP: the layered model of both encoders, and its weights from the forms in which they are published."""
