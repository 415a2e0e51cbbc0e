"""Data sets with groups of images for tests: digits, tensors in memory, and prepared data sets with a true group."""

import io
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image

from fedsweep.data.data_config import DigitsData, PreparedData
from fedsweep.preparation.plan import Options, make_plan
from fedsweep.preparation.prepare import prepare
from fedsweep.types import Domain, FederatedData, ImageSet

CLASSES = 5
SIZE = 8  # of a prepared image, in pixels
ACTIONS = ("Archery", "Billiards", "JumpRope", "PullUps", "TaiChi", "Typing", "YoYo")
PREPARED = ("scans", "ucf101")
"""The data sets whose pixels contain the number of the group, so that it is known without the recorded groups."""


def images(groups: np.ndarray, labels: np.ndarray) -> ImageSet:
    return ImageSet(torch.zeros(len(groups), 3, 1, 1), torch.from_numpy(labels), groups=torch.from_numpy(groups))


def videos() -> FederatedData:
    """Return one domain in which each group, a video, has 1 to 9 frames of one class."""
    rng = np.random.default_rng(0)
    of_video = np.repeat(np.arange(150), rng.integers(1, 10, 150))
    cut = int(np.searchsorted(of_video, 120))
    train, test = (images(part, part % CLASSES) for part in (of_video[:cut], of_video[cut:]))
    return FederatedData("videos", tuple("abcde"), (Domain("ucf", train, test),), "digest")


def copies() -> FederatedData:
    """Return three domains with copies of a few images, within a domain, in other domains and under other labels."""
    rng, domains, first = np.random.default_rng(1), [], 100
    for name, size in (("photo", 200), ("sketch", 260), ("art", 150)):
        groups = np.arange(first, first + size)
        groups[rng.choice(size, 20, replace=False)] = rng.integers(0, 25, 20)
        train, test = (images(part, rng.integers(CLASSES, size=len(part))) for part in (groups, groups[:0]))
        domains.append(Domain(name, train, test))
        first += size
    return FederatedData("copies", tuple("abcde"), tuple(domains), "digest")


def noise_of(group: int, rng: np.random.Generator) -> bytes:
    """Return a PNG file of noise, whose first two colour channels contain the number of the group."""
    pixels = rng.integers(256, size=(SIZE, SIZE, 3), dtype=np.uint8)
    pixels[..., :2] = divmod(group, 256)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def scans(root: Path) -> PreparedData:
    """Prepare a Parquet file whose column `group` contains a patient with 1 to 5 scans of one class in two domains."""
    rng = np.random.default_rng(2)
    patients = np.repeat(np.arange(220), rng.integers(1, 6, 220))
    columns = {
        "image": [noise_of(patient, rng) for patient in patients],
        "label": patients % CLASSES,
        "domain": rng.choice(["mri", "x-ray"], len(patients)),
        "group": [f"patient {patient}" for patient in patients],
    }
    pq.write_table(pa.table(columns), root / "scans.parquet")
    prepare(make_plan(Options("scans", SIZE, "parquet"), root))
    return PreparedData(set="scans", size=SIZE, domains=("mri", "x-ray"))


def clips(rng: np.random.Generator) -> Iterator[tuple[int, str, bool]]:
    """Yield the source video, the path and the split of each clip of UCF101, with two to six clips per source video."""
    for label, action in enumerate(ACTIONS):
        for number in range(1, 26):
            for clip in range(1, rng.integers(3, 8)):
                path = f"{action}/v_{action}_g{number:02}_c{clip:02}"
                yield 25 * label + number, path, number <= 7  # the official lists also test on the first seven


def ucf101(root: Path) -> PreparedData:
    """Prepare images that are named like the clips of UCF101, and divided like them by lists."""
    rng, lists = np.random.default_rng(3), root / "ucfTrainTestlist"
    lists.mkdir()
    for action in ACTIONS:
        (root / "UCF-101-midframes" / action).mkdir(parents=True)
    lines: dict[bool, list[str]] = {True: [], False: []}
    for video, path, is_test in clips(rng):
        (root / "UCF-101-midframes" / f"{path}.png").write_bytes(noise_of(video, rng))
        lines[is_test].append(f"{path}.avi\n")
    (lists / "classInd.txt").write_text("".join(f"{place} {name}\n" for place, name in enumerate(ACTIONS, 1)))
    (lists / "trainlist01.txt").write_text("".join(lines[False]))
    (lists / "testlist01.txt").write_text("".join(lines[True]))
    prepare(make_plan(Options("ucf101", SIZE), root))
    return PreparedData(set="ucf101", size=SIZE, domains=("ucf101",))


SOURCES: dict[str, Callable[[Path], DigitsData | PreparedData | FederatedData]] = {
    "digits": lambda root: DigitsData(),
    "one style": lambda root: DigitsData(domains=("plain",)),
    "videos": lambda root: videos(),
    "copies": lambda root: copies(),
    "scans": scans,
    "ucf101": ucf101,
}
"""Functions that return a data set or its configuration. Their argument is an empty folder for source images."""


def true_groups(found: ImageSet | None, data: FederatedData) -> list[int]:
    """Return the group of each image, by the pixels of prepared images and by `groups` of other images."""
    if found is None:
        return []
    if data.name not in PREPARED:
        return list(found.groups.tolist())
    pixels, _ = found.take(torch.arange(len(found)))
    return list((256 * pixels[:, 0, 0, 0].int() + pixels[:, 1, 0, 0].int()).tolist())
