"""Names of a CLIP's tensors: of the pairs of blocks here, and of transformers' CLIPModel."""

THEIRS = {
    "stem.embeddings.": "vision_model.embeddings.",
    "stem.norm.": "vision_model.pre_layrnorm.",
    "words.": "text_model.embeddings.",
    "top.vision_norm.": "vision_model.post_layernorm.",
    "top.vision_projection.": "visual_projection.",
    "top.text_norm.": "text_model.final_layer_norm.",
    "top.text_projection.": "text_projection.",
}
"""Prefixes outside of the blocks."""


def in_clip_model(name: str, place: int | None) -> str:
    """The name in transformers' CLIPModel; `place` counts a tensor's block in its own encoder, None for no block's.

    >>> in_clip_model("backbone.blocks.7.text.mlp.fc1.weight", 3), in_clip_model("backbone.stem.norm.bias", None)
    ('text_model.encoder.layers.3.mlp.fc1.weight', 'vision_model.pre_layrnorm.bias')
    """
    bare = name.removeprefix("backbone.")
    if place is not None:
        _, _, tower, rest = bare.split(".", 3)
        return f"{tower}_model.encoder.layers.{place}.{rest}"
    ours = next((prefix for prefix in THEIRS if bare.startswith(prefix)), "")
    return THEIRS[ours] + bare.removeprefix(ours) if ours else bare
