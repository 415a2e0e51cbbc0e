"""The geometry of a backbone's own evaluation transform, from its timm configuration."""

from typing import Any

from fedsweep.common.errors import UserError, near
from fedsweep.preparation.decode import FILTERS, Geometry

MODES = ("center", "squash")


def geometry_of(backbone: str, size: int) -> Geometry:
    """Crop and interpolation as timm evaluates `backbone` (a name with or without a weights tag), at `size` pixels.

    Raises:
        UserError: timm has no such model or tag, or its transform pads.
    """
    config = _config(backbone)
    mode, interpolation = config.crop_mode, config.interpolation
    if mode not in MODES or interpolation not in FILTERS:
        raise UserError(
            f"`--backbone` {backbone} is evaluated with the crop `{mode}` and `{interpolation}` interpolation, but "
            f"`data prepare` knows {' and '.join(MODES)}, {' and '.join(FILTERS)}."
        )
    return Geometry(size, float(config.crop_pct), mode, interpolation)


def _config(backbone: str) -> Any:
    import timm
    from timm.models import get_pretrained_cfg

    name, _, tag = backbone.partition(".")
    if not timm.is_model(name):
        hint = near(name, timm.list_models()) or "; `timm.list_models()` names those that it has."
        raise UserError(f"`--backbone`: timm has no model `{name}`{hint}")
    try:
        config = get_pretrained_cfg(backbone)
    except RuntimeError:
        tags = [full.partition(".")[2] for full in timm.list_pretrained(f"{name}.*")]
        hint = near(tag, tags) or f"; it has {', '.join(tags)}."
        raise UserError(f"`--backbone`: timm has no weights `{tag}` of {name}{hint}") from None
    if config is None:
        raise UserError(f"`--backbone`: timm says nothing about how {name} is evaluated.")
    return config
