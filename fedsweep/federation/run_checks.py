"""Checks of a run's configuration that involve several of its parts. `config` is always a `RunConfig`."""

from typing import Any


def check_shared_model(config: Any) -> None:
    """Raise ValueError if a method without a shared model is combined with options that need one."""
    method = config.method.name
    if config.base_optimizer.name == "feddyn":
        raise ValueError(
            f"`base_optimizer` feddyn corrects the mean of the clients' models, but `method` {method} does not "
            "average them"
        )
    if config.evaluation.metrics:
        raise ValueError(
            f"`evaluation.metrics` {config.evaluation.metrics[0]} compares clients with a shared model, but the "
            f"clients of `method` {method} do not share a model"
        )
    if config.evaluation.tsne_classes is not None:
        raise ValueError(
            f"`evaluation.tsne_classes` shows the features of a shared model, but the clients of `method` {method} "
            "do not share a model"
        )


def check_backbone(config: Any) -> None:
    """Raise ValueError if the backbone lacks a part that the method, a metric or LoRA needs."""
    backbone = config.backbone
    if config.method.needs.text and not backbone.has_text:
        raise ValueError(
            f"`method` {config.method.name} needs a `backbone` with a text encoder, clip or digits_clip, "
            f"but it is {backbone.name}"
        )
    if config.method.needs.head and not backbone.has_head:
        raise ValueError(
            f"`method` {config.method.name} needs a `backbone` with a head, such as timm, but it is {backbone.name}"
        )
    if "drift" in config.evaluation.metrics and not backbone.has_head:
        raise ValueError(
            f"`evaluation.metrics` drift compares heads, but `backbone` {backbone.name} has text prompts instead"
        )
    if config.lora.position not in backbone.positions:
        raise ValueError(
            f"`lora.position` must be {', '.join(backbone.positions[:-1])} or {backbone.positions[-1]} for "
            f"`backbone` {backbone.name}, but it is {config.lora.position}"
        )
    if config.lora.patch_embed and backbone.has_text:
        raise ValueError(f"`lora.patch_embed` must be false for `backbone` {backbone.name}, but it is true")
