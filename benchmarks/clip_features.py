"""Time FedAG's rounds with and without a cache of CLIP's features, and check that the results are identical.

    uv run python benchmarks/clip_features.py
    uv run python benchmarks/clip_features.py --device cuda --out benchmarks/results/NAME.json

There are two experiments. The first is the experiment `fedag_digits` with its small CLIP model. The second uses noise
images at 224 px, a CLIP model of the size of ViT-B/32 on the server and a ViT-Tiny on each client. Both models have
random weights, and each client trains for one step per round. Runs with and without the cache are timed in turn. The
first round, which fills the cache, is left out. On a CPU, one thread is used.
"""

import argparse
import json
import os
import platform
import statistics
import tempfile
from dataclasses import replace
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import CLIPConfig, CLIPModel

from fedsweep.common.paths import find
from fedsweep.common.yaml_values import read_yaml
from fedsweep.federation.build_and_run import Device, build
from fedsweep.federation.rounds import federate
from fedsweep.federation.run_config import RunConfig
from fedsweep.models.activation_cache import FrozenRows
from fedsweep.models.clip.backbone import SHIPPED
from fedsweep.preparation.plan import Options, make_plan
from fedsweep.preparation.prepare import prepare
from fedsweep.types import RoundResult

ROUNDS = 4
DOMAINS, CLASSES, PER_CLASS = ("art", "photo", "sketch"), ("dog", "horse", "house"), 12
B32 = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
TEXT = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 8}


def noise(root: Path) -> None:
    """Write random images at 224 px to the folder `root`, and prepare them as the data set `noise`."""
    rng = np.random.default_rng(0)
    for domain in DOMAINS:
        for name in CLASSES:
            folder = root / "images" / domain / name
            folder.mkdir(parents=True)
            for number in range(PER_CLASS):
                pixels = rng.integers(256, size=(224, 224, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{number}.bmp")
    prepare(make_plan(Options("noise", 224, "domains"), root / "images"), workers=1)


def clip(folder: Path) -> None:
    """Write a CLIP model of the size of ViT-B/32, with random weights and the tokenizer of fedsweep's small CLIP."""
    tokens = SHIPPED / "digits_clip"
    folder.mkdir()
    for name in ("vocab.json", "merges.txt", "tokenizer_config.json", "preprocessor_config.json"):
        (folder / name).write_bytes((tokens / name).read_bytes())
    small = json.loads((tokens / "config.json").read_text())["text_config"]
    kept = {name: small[name] for name in ("vocab_size", "max_position_embeddings", "bos_token_id", "eos_token_id")}
    torch.manual_seed(0)
    vision = {**B32, "image_size": 224, "patch_size": 32}
    CLIPModel(CLIPConfig(vision_config=vision, text_config={**TEXT, **kept}, projection_dim=512)).save_pretrained(
        folder
    )


def experiments(root: Path) -> dict[str, RunConfig]:
    """Return a dict from descriptions of CLIP models to experiments; the larger CLIP model is in the folder `root`."""
    digits = RunConfig.of(read_yaml(find("experiments", "fedag_digits")), "fedag_digits")
    office = RunConfig.of(read_yaml(find("experiments", "fedag_office_home")), "fedag_office_home")
    data = {"name": "prepared", "set": "noise", "size": 224, "domains": [*DOMAINS], "held_out_domains": [DOMAINS[-1]]}
    large: dict[str, Any] = {
        "data": data,
        "method.clip": {"name": "clip", "model": str(root / "clip")},
        "backbone.model": "vit_tiny_patch16_224",
        "backbone.pretrained": "none",
        "partition.proxy_share": 0.4,
        "synthetic": {"name": "surrogate", "share": 0.5},
        "local": {"batch_size": 8, "steps": 1},
    }
    rounds = {"federation.rounds": ROUNDS}
    return {
        "digits, 6 blocks of width 64": digits.override(rounds, "benchmark"),
        "B/32, 12 blocks of width 768": office.override({**large, **rounds}, "benchmark"),
    }


def played(config: RunConfig, device: Device, kept: bool) -> list[RoundResult]:
    """Run an experiment and return the results of its rounds; CLIP features are cached if `kept` is set."""
    federation = build(config, device)
    if not kept:
        reader = replace(federation.trainer.reader, kept=FrozenRows())
        federation = replace(federation, trainer=replace(federation.trainer, reader=reader))
    return list(federate(federation))


def equal(first: list[RoundResult], second: list[RoundResult]) -> bool:
    """Return whether two runs have bit-identical final adapters and the same metrics in all rounds."""
    one, other = first[-1].state.adapter, second[-1].state.adapter
    same = all(torch.equal(one[name], other[name]) for name in one)
    return same and [dict(each.metrics) for each in first] == [dict(each.metrics) for each in second]


def main() -> None:
    """Run the experiments, print a table and, with `--out`, write a JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--turns", type=int, default=2, help="number of runs with and without the cache")
    parser.add_argument("--digits", action="store_true", help="leave out the larger CLIP model")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        os.environ |= {"FEDSWEEP_DATA": str(root), "FEDSWEEP_CACHE": str(root / "kept")}
        noise(root)
        clip(root / "clip")
        chosen = list(experiments(root).items())[: 1 if given.digits else None]
        for name, config in track(chosen, "runs"):
            seconds: dict[bool, list[float]] = {True: [], False: []}
            same = True
            for _ in range(given.turns):
                both = {kept: played(config, given.device, kept) for kept in (False, True)}
                same &= equal(both[True], both[False])
                for kept, rounds in both.items():
                    seconds[kept] += [one.seconds for one in rounds[2:]]
            anew, known = (statistics.median(seconds[kept]) for kept in (False, True))
            row = {"server": name, "seconds_anew": round(anew, 3), "seconds_kept": round(known, 3)}
            rows.append({**row, "ratio": round(anew / known, 2), "equal_bits": same})
    table = Table("server's CLIP", "s per round, computed anew", "s per round, cached", "ratio", "bit-identical")
    for row in rows:
        table.add_row(*map(str, row.values()))
    Console().print(table)
    if given.out:
        facts = {"date": date.today().isoformat(), "device": given.device, "machine": platform.machine(), "threads": 1}
        versions = {package: version(package) for package in ("torch", "transformers", "timm")}
        given.out.write_text(json.dumps({**facts, "versions": versions, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
