"""Provenance of a run: tags of its trials, and the warning about images that no generator made."""

from collections.abc import Mapping

TAKEN_FROM = "taken_from"
"""The sweep that ran a trial of this one before."""

SYNTHETIC = "synthetic"
"""The source of the synthetic images that a run trains on."""

STAND_INS = {
    "surrogate": "surrogates, drawn from the statistics of images held out for the server and made by no generator"
}
"""What the sources that replace a generator make."""


def stand_in(tags: Mapping[str, str]) -> str | None:
    """Return what replaced a generator in a run with these tags, or None.

    >>> stand_in({"synthetic": "folder"}), stand_in({})
    (None, None)
    """
    return STAND_INS.get(tags.get(SYNTHETIC, ""))


def warning(made: str, where: str = "") -> str:
    """Return the warning about what replaced a generator.

    >>> warning("surrogates", "all arms")
    'Synthetic images: surrogates (all arms).'
    """
    return f"Synthetic images: {made}{f' ({where})' if where else ''}."
