"""The README of an export: what it is, and the lines that load it without fedsweep."""

from __future__ import annotations

import json

from fedsweep.export.card import BACKBONE, WHOLE, ExportCard
from fedsweep.results.arms import arm_label


def readme(card: ExportCard) -> str:
    """Markdown; its block of Python runs as it stands, in the export's folder."""
    images, origin = card.images, card.origin
    arm = f" ({arm_label(origin.arm)})" if origin.arm else ""
    scores = [f"{name} {score:.4f}" for name, score in card.scores.items()]
    optimistic = ": by these results, which are therefore optimistic" if origin.sweep else ""
    rows = {
        "from": f"{card.what}{arm}",
        "method": f"{card.method}, seed {card.seed}",
        "state": f"{card.outcome}, after round {card.round}",
        "results": ", ".join(scores) or "none: the run tested this model on no images of its client's",
        **({"chosen as": f"{origin.chosen}{optimistic}"} if origin.chosen else {}),
        "classes": f"{len(card.classes)}: {', '.join(card.classes[:20])}{', ...' * (len(card.classes) > 20)}",
        "images": f"{images.size} x {images.size} pixels, mean {list(images.mean)}, std {list(images.std)}, "
        f"{images.crop_mode} crop of {images.crop_pct:g}, {images.interpolation}",
        "backbone": f"{_backbone(card)}, weights {card.weights}",
        "written by": f"fedsweep {card.fedsweep}",
    }
    table = ["| | |", "| --- | --- |", *(f"| {name} | {_cell(text)} |" for name, text in rows.items())]
    if card.left_out:
        table += ["", f"Trained too, but no part of this model's prediction: {', '.join(card.left_out)}."]
    loaded = "PEFT's adapter on the plain backbone" if card.form == "peft" else "The whole network's weights"
    return "\n".join(
        [
            f"# {_cell(card.what)}",
            "",
            f"{loaded}. All hyperparameters, metrics and digests are in `export.json`.",
            "",
            *table,
            "",
            "To load it, in this folder and without fedsweep:",
            "",
            "```python",
            *(_of_timm(card) if card.backbone.of_timm else _of_clip(card)),
            "```",
            "",
            "`fedsweep predict` does the same with a folder of pictures.",
            "",
        ]
    )


def _backbone(card: ExportCard) -> str:
    """By its kind, and its name where it has one."""
    kind, name = (card.hyperparameters.get(f"backbone.{one}") for one in ("name", "model"))
    return f"{kind} {name}" if name else str(kind)


def _of_timm(card: ExportCard) -> list[str]:
    recipe = card.backbone
    first = [json.dumps(recipe.model)] if recipe.model else []
    pretrained = ["pretrained=True"] if recipe.fetched else []
    arguments = [*first, *pretrained, *(f"{name}={value!r}" for name, value in recipe.arguments.items())]
    weights = BACKBONE if card.form == "peft" else WHOLE
    read = [] if recipe.fetched else [f'timm.models.load_checkpoint(backbone, f"{{folder}}/{weights}")']
    pixels = "(images.float() / 255).mean(1, keepdim=True)" if len(card.images.mean) == 1 else "images.float() / 255"
    return [
        *_imports(card, "import timm", "import torch"),
        f"backbone = {recipe.call}({', '.join(arguments)})",
        *read,
        *_tuned(card),
        "",
        *_function(card, pixels, "model({pixels})"),
    ]


def _of_clip(card: ExportCard) -> list[str]:
    recipe = card.backbone
    where = json.dumps(recipe.model) if recipe.fetched else f'f"{{folder}}/{recipe.model}"'
    where = "folder" if recipe.model == "." else where
    return [
        *_imports(card, "import torch", "from transformers import CLIPModel, CLIPTokenizer"),
        f"backbone = CLIPModel.from_pretrained({where}, dtype=torch.float32)",
        *_tuned(card),
        f"tokenizer = CLIPTokenizer.from_pretrained({where})",
        'prompts = tokenizer(card["prompts"], padding=True, return_tensors="pt")',
        "",
        *_function(card, "images.float() / 255", "model(**prompts, pixel_values={pixels}).logits_per_image"),
    ]


def _imports(card: ExportCard, *lines: str) -> list[str]:
    peft = ["from peft import PeftModel"] if card.form == "peft" else []
    return [
        "import json",
        "",
        *sorted([*lines, *peft], key=lambda line: (line.startswith("from"), line)),
        "",
        'folder = "."  # where this file lies',
        'with open(f"{folder}/export.json") as file:',
        "    card = json.load(file)",
    ]


def _tuned(card: ExportCard) -> list[str]:
    cut = [f"backbone.{name} = backbone.{name}[:{count}]" for name, count in card.cut.items()]
    adapted = "PeftModel.from_pretrained(backbone, folder)" if card.form == "peft" else "backbone"
    return [*cut, f"model = {adapted}.eval()"]


def _function(card: ExportCard, pixels: str, call: str) -> list[str]:
    size = card.images.size
    return [
        'mean, std = (torch.tensor(card["images"][name]).view(-1, 1, 1) for name in ("mean", "std"))',
        "",
        "",
        "@torch.no_grad()",
        f'def logits(images):  # uint8 (n, 3, {size}, {size}), RGB; (n, classes) in the order of card["classes"]',
        f"    pixels = {pixels}",
        f"    return {call.format(pixels='(pixels - mean) / std')}",
    ]


def _cell(text: str) -> str:
    """Text in a table or a heading, whatever a class is called."""
    return " ".join(text.split()).replace("|", "\\|")
