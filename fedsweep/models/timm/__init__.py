"""Backbones of timm that run block by block, and their weights."""
