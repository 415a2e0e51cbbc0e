"""The CPU time of reading images from files: the released code decodes them in each round, fedsweep once."""

import importlib
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torchvision import transforms

from benchmarks.data_loading import write_images
from fedsweep.data.prepared.dataset import PreparedData
from fedsweep.models.layered import standardize_

from .setting import BATCH, MEAN, PIXELS, STD

IMAGES, WIDE, HIGH = 512, 512, 384
"""The number of JPEG images, and their size, which is about that of photographs in DomainNet."""


def released(code: Path, paths: list[Path]) -> float:
    """Return the CPU milliseconds in which the released data set reads an image for training."""
    with patch.object(sys, "path", [str(code), *sys.path]), patch.dict(sys.modules):
        for name in ("datasets", "datasets.DomainNet"):
            sys.modules.pop(name, None)
        module: Any = importlib.import_module("datasets.DomainNet")
    bicubic = transforms.InterpolationMode.BICUBIC
    preprocess = transforms.Compose(  # as in the released get_domainnet_dataset
        [
            transforms.ToTensor(),
            transforms.Resize((PIXELS, PIXELS), interpolation=bicubic, antialias=False),
            transforms.Normalize(MEAN, STD),
        ]
    )
    known = module.DomainNet([*map(str, paths)], [0] * len(paths), preprocess, "photo")
    begun = time.process_time()
    for batch in torch.arange(len(paths)).split(BATCH):
        torch.stack([known[place][0] for place in batch.tolist()])
    return 1000 * (time.process_time() - begun) / len(paths)


def ours(root: Path) -> tuple[float, float]:
    """Return the CPU milliseconds in which fedsweep prepares an image once, and reads a prepared image."""
    os.environ["FEDSWEEP_DATA"] = str(root / "prepared")
    command = ["data", "prepare", "bench", "--root", str(root / "images"), "--layout", "domains"]
    before = os.times()
    subprocess.run(
        [sys.executable, "-m", "fedsweep", *command, "--size", str(PIXELS)], check=True, stdout=subprocess.DEVNULL
    )
    after = os.times()
    preparing = after.children_user + after.children_system - before.children_user - before.children_system
    names = tuple(sorted(one.name for one in (root / "images").iterdir()))
    domains = PreparedData(set="bench", size=PIXELS, domains=names).load().domains
    mean, std = (torch.tensor(one).view(-1, 1, 1) for one in (MEAN, STD))
    sets = [images for domain in domains for images in (domain.train, domain.test)]
    for images in sets:
        images.take(torch.arange(len(images)))  # the first time, the system reads the file
    begun = time.process_time()
    for images in sets:
        for index in torch.arange(len(images)).split(BATCH):
            standardize_(images.take(index)[0].float().div_(255), mean, std)
    return 1000 * preparing / IMAGES, 1000 * (time.process_time() - begun) / IMAGES


def measure(code: Path) -> dict[str, float]:
    """Return the CPU milliseconds per image of reading with each program, and of fedsweep's preparation."""
    with tempfile.TemporaryDirectory() as folder:
        write_images(Path(folder) / "images", IMAGES, WIDE, HIGH)
        paths = sorted((Path(folder) / "images").rglob("*.jpg"))
        released(code, paths[:BATCH])
        preparing, reading = ours(Path(folder))
        return {"released": released(code, paths), "fedsweep": reading, "fedsweep, once": preparing}
