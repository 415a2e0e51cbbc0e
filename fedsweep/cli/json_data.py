"""The JSON documents about prepared data sets."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fedsweep.cli import json_output

if TYPE_CHECKING:
    from fedsweep.data.prepared.card import StoreCard
    from fedsweep.preparation.prepare import Prepared


def print_list(cards: Sequence[StoreCard], damaged: Sequence[str]) -> None:
    """Print the document of `fedsweep data list`."""
    from fedsweep.data.prepared.card import store_folder, unfinished
    from fedsweep.preparation.layouts import ALL

    described = [
        {
            "name": card.name,
            "size": card.size,
            "folder": store_folder(card.name, card.size),
            "images": card.images,
            "classes": card.class_names,
            "domains": [*card.domains],
            "digest": card.digest,
        }
        for card in cards
    ]
    layouts = [{"name": one.name, "files": one.looks_like} for one in ALL]
    json_output.document("data list", data_sets=described, damaged=damaged, unfinished=unfinished(), layouts=layouts)


def print_prepared(made: Prepared) -> None:
    """Print the document of `fedsweep data prepare`."""
    fields = {"data_set": made.card, "folder": made.folder, "already": made.already, "warnings": made.warnings}
    json_output.document("data prepare", **fields)


def print_images(rows: Iterable[tuple[str, str, str]]) -> None:
    """Print the document of `fedsweep data show --split`, from the domain, class and path of each image."""
    images = [{"domain": domain, "class": name, "path": path} for domain, name, path in rows]
    json_output.document("data show", images=images)


def print_counts(folder: Path, card: StoreCard, verified: bool, picture: Path) -> None:
    """Print the document of `fedsweep data show`."""
    from fedsweep.preparation.tables import label_counts

    counts = {
        domain: {
            name: {"train": train, "test": test}
            for name, train, test in zip(card.class_names, *numbers.tolist(), strict=True)
        }
        for domain, numbers in label_counts(folder, card).items()
    }
    json_output.document("data show", data_set=card, counts=counts, verified=verified, picture=picture)
