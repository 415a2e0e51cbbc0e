"""What a run says of itself beside its numbers: tags of its trials, and sentences where one must not be missed."""

from collections.abc import Mapping

TAKEN_FROM = "taken_from"
"""The sweep that ran a trial of this one before."""

SYNTHETIC = "synthetic"
"""The source of the synthetic images that a run trains on."""

STAND_INS = {
    "surrogate": "surrogates, drawn from the statistics of images held out for the server and made by no generator"
}
"""What the sources made in a generator's place are."""


def stand_in(marks: Mapping[str, str]) -> str | None:
    """What took a generator's place in a run with these marks, or None.

    >>> stand_in({"synthetic": "folder"}), stand_in({})
    (None, None)
    """
    return STAND_INS.get(marks.get(SYNTHETIC, ""))


def warning(made: str, where: str = "") -> str:
    """The sentence about what stood in.

    >>> warning("surrogates", "all arms")
    'Synthetic images: surrogates (all arms).'
    """
    return f"Synthetic images: {made}{f' ({where})' if where else ''}."
