"""Fixtures with a small prepared data set of digits and a pre-training on it that takes seconds."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedsweep.common.yaml_values import read_yaml
from fedsweep.data.digits import DigitsData
from fedsweep.data.prepared.arrow_files import record_batch, write_domain
from fedsweep.data.prepared.card import CARD, CopiesCard, DomainCard, StoreCard, store_folder
from fedsweep.data.prepared.dataset import content_digest, read_domain
from fedsweep.pretraining.config import PretrainConfig
from fedsweep.pretraining.loop import Session, default_out, start, train
from fedsweep.pretraining.network import EpochRecord

SHIPPED = Path(__file__).parents[2] / "experiments" / "pretrain"
CLASSES = 3
Run = Callable[..., tuple[Session, list[EpochRecord]]]


def quiet(images: int, loss: torch.Tensor) -> None:
    """Do nothing; tests pass this function as `on_step`."""


def write_store(domains: list[str], name: str = "toy", size: int = 16, images: int = 400) -> None:
    """Prepare digits 0, 1 and 2 in the given styles as the data set `name` in the data folder."""
    folder = store_folder(name, size)
    folder.mkdir(parents=True)
    cards, read = {}, []
    for domain in DigitsData(domains=tuple(domains)).load().domains:
        batches = []
        for part in (domain.train, domain.test):
            rows = (part.labels < CLASSES).nonzero().flatten()[:images]
            pixels, labels = part.take(rows)
            pixels = torch.nn.functional.interpolate(pixels, size=(size, size))
            batches.append(record_batch(pixels.numpy(), labels.tolist(), [str(row) for row in rows.tolist()]))
        path = folder / f"{domain.name}.arrow"
        write_domain(path, *batches)
        read.append(read_domain(path, domain.name))
        train, test = (len(part) for part in (read[-1].train, read[-1].test))
        cards[domain.name] = DomainCard(train=train, test=test, bytes=path.stat().st_size)
    names = tuple("012")
    card = StoreCard(
        name=name,
        size=size,
        layout="toy",
        class_names=names,
        domains=cards,
        digest=content_digest(names, read),
        crop_pct=1.0,
        copies=CopiesCard(groups=0, both_splits=0, other_classes=0),
    )
    (folder / CARD).write_text(card.model_dump_json())


@pytest.fixture(scope="session")
def written_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a data folder with the data set `toy` once, and return it; each test uses a copy."""
    folder = tmp_path_factory.mktemp("pretraining") / "data"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDSWEEP_DATA", str(folder))
        write_store(["plain"])
    return folder


@pytest.fixture
def store(written_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Use a copy of `written_store` as the data folder, and return it; its data set `toy` has the domain `plain`."""
    monkeypatch.setenv("FEDSWEEP_DATA", str(tmp_path / "data"))
    monkeypatch.chdir(tmp_path)
    return Path(shutil.copytree(written_store, tmp_path / "data"))


def toy_data() -> dict[str, Any]:
    """Return the values of the shipped pre-training for photographs, changed to `toy` and two blocks of width 16."""
    data: dict[str, Any] = read_yaml(SHIPPED / "tinyimagenet_vit.yaml")
    data["backbone"] |= {"img_size": 16, "patch_size": 4, "embed_dim": 16, "num_blocks": 2, "num_heads": 2}
    data["data"] |= {"set": "toy", "size": 16, "domains": ["plain"]}
    data["optimizer"] |= {"lr": 3e-3}
    data["augmentation"] |= {"crop_area": [0.8, 1.0], "flip": 0.0}
    data["mix"] = {"mixup": 0.2, "cutmix": 1.0}
    return data | {"epochs": 3, "images_per_epoch": 96, "batch_size": 32}


@pytest.fixture
def toy(store: Path) -> PretrainConfig:
    """Return a pre-training that uses all random and stateful parts: mixing, stochastic depth and averaged weights."""
    return PretrainConfig.of(toy_data(), "toy")


@pytest.fixture
def play(toy: PretrainConfig) -> Run:
    """Return a function that trains `toy` with changed options and returns the session and the epochs' records."""

    def run(changes: dict[str, Any] | None = None, name: str = "toy", **options: Any):
        session, saved = start(toy.override(changes or {}, "toy"), default_out(name), **options)
        return session, list(train(session, saved, quiet))

    return run


def without_seconds(records: list[EpochRecord]) -> list[tuple[float, ...]]:
    """Return the values of each record apart from its seconds, which differ between repetitions."""
    return [(one.epoch, one.train_loss, one.accuracy, one.loss, one.lr) for one in records]


def uniform_images(count: int, size: int, seed: int = 0) -> torch.Tensor:
    """Return random pixels (count, 3, size, size) in [0, 1]."""
    return torch.from_numpy(np.random.default_rng(seed).random((count, 3, size, size), dtype=np.float32))
