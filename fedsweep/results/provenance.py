"""Provenance of a run: tags of its trials, and the warning about images that replace a generator's."""

from collections.abc import Mapping

TAKEN_FROM = "taken_from"
"""Tag: the earlier sweep that ran a trial of this one."""

SYNTHETIC = "synthetic"
"""Tag: the source of the synthetic images that a run trains on."""

STAND_INS = {
    "surrogate": "surrogates, drawn from the statistics of images held out for the server and made by no generator"
}
"""Descriptions of images that replace a generator's, by source."""


def stand_in(tags: Mapping[str, str]) -> str | None:
    """Return the description of images that replaced a generator's in a run with these tags, or None.

    >>> stand_in({"synthetic": "folder"}), stand_in({})
    (None, None)
    """
    return STAND_INS.get(tags.get(SYNTHETIC, ""))


def warning(made: str, where: str = "") -> str:
    """Return the warning about images that replaced a generator's.

    >>> warning("surrogates", "all arms")
    'Synthetic images: surrogates (all arms).'
    """
    return f"Synthetic images: {made}{f' ({where})' if where else ''}."
