"""Time one epoch of a prepared data set against torchvision's ImageFolder, and measure the memory of trials.

    uv run python benchmarks/data_loading.py
    uv run python benchmarks/data_loading.py --root DIR --layout domains --size 64 --out benchmarks/results/NAME.json

Without `--root`, 10,000 JPEG images of random smooth colours are first written to a temporary folder. All loaders
produce shuffled batches of normalised float32 pixels. ImageFolder is timed with two worker processes, too. The loaders
are timed in turn, and the medians are reported.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torchvision
from PIL import Image
from rich.console import Console
from rich.progress import track
from torchvision.transforms import v2

from fedsweep.data.prepared.card import store_folder
from fedsweep.data.prepared.dataset import PreparedData
from fedsweep.models.layered import standardize_
from fedsweep.types import ImageSet

BATCH = 128
MEAN, STD = torch.full((3, 1, 1), 0.5), torch.full((3, 1, 1), 0.5)
console = Console(stderr=True, highlight=False)


def write_images(root: Path, count: int, width: int, height: int) -> None:
    """Write JPEG images of random smooth colours, whose files are about as large as those of photographs."""
    rng = np.random.default_rng(0)
    for number in track(range(count), description="write JPEGs", console=console):
        folder = root / f"domain{number % 2}" / f"class{number // 2 % 7}"
        folder.mkdir(parents=True, exist_ok=True)
        coarse = Image.fromarray(rng.integers(256, size=(height // 4, width // 4, 3), dtype=np.uint8))
        coarse.resize((width, height), Image.Resampling.BICUBIC).save(folder / f"{number}.jpg", quality=90)


def from_folder(root: Path, size: int, workers: int) -> Callable[[], int]:
    """Return a function that reads all images once with ImageFolder and DataLoader, and returns their number."""
    transform = v2.Compose(
        [
            v2.Resize(size, v2.InterpolationMode.BICUBIC),
            v2.CenterCrop(size),
            v2.PILToTensor(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize([0.5] * 3, [0.5] * 3),
        ]
    )
    rgb = v2.Compose([v2.RGB(), transform])
    sets = [torchvision.datasets.ImageFolder(str(path), rgb) for path in sorted(root.iterdir())]
    loader = torch.utils.data.DataLoader(
        torch.utils.data.ConcatDataset(sets), BATCH, shuffle=True, num_workers=workers, persistent_workers=False
    )
    return lambda: sum(len(images) for images, _ in loader)


def from_store(sets: list[ImageSet]) -> Callable[[], int]:
    """Return a function that reads all images of memory-mapped data sets once, and returns their number."""

    def batches() -> Iterator[torch.Tensor]:
        for images in sets:
            for index in torch.randperm(len(images)).split(BATCH):
                pixels, _ = images.take(index)
                yield standardize_(pixels.float().div_(255), MEAN, STD)

    return lambda: sum(len(pixels) for pixels in batches())


def time_in_turn(sides: dict[str, Callable[[], int]], repeats: int) -> dict[str, float]:
    """Return a dict from the name of each loader to its median seconds. In each repetition, all loaders run once."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(repeats):
        for name, epoch in sides.items():
            begun = time.perf_counter()
            epoch()
            seconds[name].append(time.perf_counter() - begun)
    return {name: statistics.median(times) for name, times in seconds.items()}


TRIAL = """
import sys
from itertools import islice
import torch
from fedsweep.common.yaml_values import read_yaml
from fedsweep.federation.run_config import RunConfig
from fedsweep.federation.build_and_run import run
from fedsweep.common.paths import find
torch.set_num_threads(1)
experiment = RunConfig.of(read_yaml(find("experiments", "fedra_pacs")), "fedra_pacs")
changes = {"data": {"name": "prepared", "set": "bench", "size": int(sys.argv[1]), "domains": sys.argv[2:]}}
changes |= {"backbone.pretrained": "none", "backbone.img_size": int(sys.argv[1]), "federation.depths": [6]}
changes |= {"backbone.mean": [0.5] * 3, "backbone.std": [0.5] * 3, "local.steps": "epoch", "federation.rounds": 1}
for result in run(experiment.override(changes, "the benchmark")):
    pass
print("ready", flush=True)
sys.stdin.readline()
"""


def memory(config: PreparedData, processes: int) -> dict[str, float]:
    """Train `processes` trials in parallel for a round over all images; return their mean memory per process in MiB."""
    command = [sys.executable, "-c", TRIAL, str(config.size), *config.domains]
    trials = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(processes)
    ]
    try:
        for trial in trials:
            if trial.stdout is None or not trial.stdout.readline().startswith("ready"):
                raise RuntimeError("a trial ended early")
        rolled = [Path(f"/proc/{trial.pid}/smaps_rollup").read_text().splitlines()[1:] for trial in trials]
        fields = [{line.split(":")[0]: int(line.split()[1]) for line in lines} for lines in rolled]
        mean = {name: sum(one[name] for one in fields) / processes / 1024 for name in fields[0]}
        private = mean["Private_Clean"] + mean["Private_Dirty"]
        shared = mean["Shared_Clean"] + mean["Shared_Dirty"]
        return {"resident": mean["Rss"], "proportional": mean["Pss"], "private": private, "shared": shared}
    finally:
        for trial in trials:
            trial.communicate("\n")


READER = """
import sys
from pathlib import Path
import torch
from fedsweep.data.prepared.dataset import PreparedData
def private():
    rolled = Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    return sum(int(line.split()[1]) for line in rolled if line.startswith("Private_Dirty"))
def read(images, most):
    for index in torch.randperm(len(images)).split(64)[:most]:
        images.take(index)
config = PreparedData(set="bench", size=int(sys.argv[1]), domains=tuple(sys.argv[2:]))
sets = [part for domain in config.load().domains for part in (domain.train, domain.test)]
read(sets[0], 1)
before = private()
for images in sets:
    read(images, None)
print((private() - before) / 1024)
"""


def private_of_reading(config: PreparedData) -> float:
    """Return the memory in MiB that a process takes for itself while it reads all images of a data set.

    Pages of the file that are in memory belong to all processes that read it, and do not count.
    """
    command = [sys.executable, "-c", READER, str(config.size), *config.domains]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def main() -> None:
    """Prepare the images, time the loaders, measure memory, and print or write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, help="images in the layout <domain>/<class>/*")
    parser.add_argument("--count", type=int, default=10_000, help="number of images to write if --root is not given")
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["FEDSWEEP_DATA"] = f"{scratch}/data"
        root = given.root or Path(scratch) / "images"
        if given.root is None:
            write_images(root, given.count, given.size, given.size)
        prepare = ["data", "prepare", "bench", "--root", str(root), "--layout", "domains", "--size", str(given.size)]
        begun = time.perf_counter()
        subprocess.run([sys.executable, "-m", "fedsweep", *prepare], check=True, stdout=sys.stderr)
        prepared = time.perf_counter() - begun
        config = PreparedData(set="bench", size=given.size, domains=tuple(sorted(one.name for one in root.iterdir())))
        sets = [part for domain in config.load().domains for part in (domain.train, domain.test)]
        sides = {"store": from_store(sets)} | {
            f"ImageFolder, {workers} workers": from_folder(root, given.size, workers) for workers in (0, 2)
        }
        seconds = time_in_turn(sides, given.repeats)
        images = sum(map(len, sets))
        size = sum(path.stat().st_size for path in store_folder("bench", given.size).iterdir())
        figures: dict[str, Any] = {
            "date": date.today().isoformat(),
            "machine": f"{os.cpu_count()} x {platform.machine()}, torch {torch.__version__}",
            "images": images,
            "pixels": given.size,
            "store_mib": size / 2**20,
            "prepare_seconds": prepared,
            "epoch_seconds": seconds,
            "ratio": {name: seconds[name] / seconds["store"] for name in sides if name != "store"},
            "private_mib_of_reading": private_of_reading(config),
            "memory_mib": {str(count): memory(config, count) for count in (1, 4)},
        }
    print(json.dumps(figures, indent=2))
    if given.out:
        given.out.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
