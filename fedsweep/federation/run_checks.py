"""Checks of a run's configuration that involve several of its parts. `config` is always a `RunConfig`."""

from typing import Any

from fedsweep.common.randomness import STREAMS, StreamName


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


def check_streams(config: Any) -> None:
    """Raise ValueError if `seed_streams` names only random streams from which the run draws nothing."""
    if config.seed_streams == "all" or not (reasons := undrawn(config)).keys() >= {*config.seed_streams}:
        return
    drawn = ", ".join(name for name in STREAMS if name not in reasons)
    named = "; ".join(f"{name} ({reasons[name]})" for name in config.seed_streams)
    raise ValueError(
        f"`seed_streams` must name at least one of the random streams from which the run draws, {drawn}, "
        f"but it names only {named}"
    )


def undrawn(config: Any) -> dict[StreamName, str]:
    """Return the random streams from which a run draws nothing, each with the reason in words.

    A run with any other seed for these streams is the same run. The streams `batches` and `initial` count as drawn.
    """
    federation, evaluation, clients = config.federation, config.evaluation, config.client_domains()
    depths_drawn = federation.depths == "dynamic" and len(config.depths()) > 1
    ranks_drawn = federation.ranks == "dynamic" and len(config.ranks()) > 1
    all_take_part = len(config.first_cohort([*clients])) == len(clients)
    name, method = config.partition.name, config.method.name
    found: dict[StreamName, str] = {}
    if not config.partition.draws and not federation.malicious_share:
        found["partition"] = f"`partition` {name} divides and holds out no images at random, and no client is malicious"
    if all_take_part and not depths_drawn and not ranks_drawn:
        found["cohort"] = "all clients take part in every round, and their depths and ranks are fixed"
    if not config.method.draws_blocks(config.depths(), config.backbone.depth):
        found["allocation"] = f"`method` {method} does not draw the blocks of clients of these depths"
    if not config.trains_on_synthetic:
        found["synthetic"] = "the run trains on no synthetic images"
    if evaluation.images_per_domain is None and evaluation.tsne_classes is None and not evaluation.metrics:
        found["evaluation"] = (
            "`evaluation.images_per_domain`, `evaluation.tsne_classes` and `evaluation.metrics` are not set"
        )
    return found
