"""The output, the error messages, the interruption and the resumption of `fedsweep pretrain`."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from fedsweep import cli
from fedsweep.common.config import flat
from fedsweep.common.paths import available, find
from fedsweep.common.yaml_values import read_yaml
from fedsweep.pretraining.config import PretrainConfig
from fedsweep.pretraining.loop import EpochTable, exclusively
from tests.cli.conftest import Call, Refused
from tests.pretraining.conftest import SHIPPED, toy_data, write_store

ROOT = Path(__file__).parents[2]


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Write the pre-training `toy` and its data, and return a function that writes `toy` with other options."""
    monkeypatch.setenv("FEDSWEEP_DATA", "data")
    monkeypatch.chdir(tmp_path)
    write_store(["plain", "thick"])

    def write(changes: dict[str, Any]) -> None:
        path = Path("experiments/pretrain/toy.yaml")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(yaml.safe_dump(toy_data() | {"epochs": 2} | changes))

    write({})
    return write


@pytest.mark.usefixtures("toy")
def test_pretrain_prints_a_line_per_epoch_and_writes_weights_and_card(call: Call):
    answer = call("pretrain", "toy", "seed=3")
    assert answer.code == 0, answer
    lines = answer.out.splitlines()
    assert lines[0].split() == ["epoch", "train", "loss", "val", "acc", "val", "loss", "lr", "seconds"]
    assert [line.split()[0] for line in lines[1:]] == ["1", "2"]
    assert all(len(line.split()) == 6 for line in lines[1:])
    assert answer.err.endswith("weights written to data/backbones/toy.safetensors.\n")
    card = json.loads(Path("data/backbones/toy.json").read_text())
    assert card["recipe"]["seed"] == 3
    left = [".toy.safetensors.lock", "toy.json", "toy.safetensors"]
    assert sorted(path.name for path in Path("data/backbones").iterdir()) == left


@pytest.mark.usefixtures("toy")
def test_ctrl_c_and_a_second_start_explain_how_to_continue(call: Call, refused: Refused, monkeypatch):
    told = [
        "Stopped before the end of the first epoch.",
        "Stopped after 1 of 2 epochs. To continue, run the same command with --resume.",
    ]
    for last_step, sentence in zip((1, 5), told, strict=True):  # an epoch has three steps
        steps: list[int] = []

        def interrupt(
            table: EpochTable, images: int, loss: Any, steps: list[int] = steps, last: int = last_step
        ) -> None:
            steps.append(images)
            if len(steps) == last:
                raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(EpochTable, "on_step", interrupt)
            answer = call("pretrain", "toy")
        assert answer.code == 130
        assert answer.err.startswith(sentence)
    checkpoint = Path("data/backbones/toy.checkpoint.safetensors").absolute()
    held = f"{checkpoint} contains 1 of 2 epochs"
    assert refused("pretrain", "toy") == f"{held}; use `--resume` to continue, or delete the file to start again."
    lr = f"{checkpoint} was written with `optimizer.lr` 0.003, but it is 0.1 now; `--resume` needs the same values."
    assert refused("pretrain", "toy", "optimizer.lr=0.1", "--resume") == lr
    answer = call("pretrain", "toy", "--resume")
    assert answer.code == 0
    assert [line.split()[0] for line in answer.out.splitlines()[1:]] == ["1", "2"]  # starts again from epoch 1
    weights = Path("data/backbones/toy.safetensors").absolute()
    assert refused("pretrain", "toy") == f"{weights} already exists; delete it or choose another file with `--out`."
    finished = f"`--resume` needs {checkpoint}, which does not exist, because {weights} is finished."
    assert refused("pretrain", "toy", "--resume") == finished


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["digit_vit"], "there is no pre-training `digit_vit`; did you mean `digits_vit`?"),
        (["fedra_digits"], "there is no pre-training `fedra_digits`; to use the experiment "
         "of that name, run `fedsweep run fedra_digits`."),
        (["toy", "--device", "tpu"], "`--device` must be cpu or cuda, but it is `tpu`."),
        (["toy", "--device", "cuda"], "`--device` is cuda, but torch finds no GPU."),
        (["toy", "epoch=3"], "pre-training toy: `epoch` is not a hyperparameter of this pre-training; "
         "did you mean `epochs`?"),
        (["toy", "epochs=0"], "pre-training toy: `epochs` must be greater than 0, but it is 0."),
        (["toy", "augmentation=glyph"], "pre-training toy: `augmentation.name` must be one of glyphs, images, "
         "but it is `glyph`; did you mean `glyphs`?"),
        (["toy", "backbone.pretrained=timm"], None),
        (["toy", "backbone.pretrained=backbones/a.safetensors"], "pre-training toy: `backbone.pretrained` must be "
         "none, because pre-training starts from scratch, but it is backbones/a.safetensors."),
        (["toy", "backbone.img_size=32"], "pre-training toy: `data.size` must be 32, the image size of `backbone`, "
         "but it is 16."),
        (["toy", "backbone.patch_size=5"], "pre-training toy: `backbone.img_size` must be a multiple of the patch "
         "size 5, but it is 16."),
        (["toy", "data.domains=[plain, thick]"], "pre-training toy: `data.domains` must name one domain unless "
         "`pool_domains` is true, but it has 2: plain, thick."),
        (["toy", "data.domains=[plane]"], "`data.domains`: toy has no domain `plane`; did you mean `plain`?"),
        (["toy", "data.set=tox"], None),
        (["toy", "batch_size=97"], "pre-training toy: `images_per_epoch` must be at least `batch_size`, 97, "
         "but it is 96."),
        (["toy", "batch_size=9999", "images_per_epoch=null"], "`batch_size` must be at most 400, the number of "
         "training images in toy, but it is 9999."),
        (["toy", "images_per_epoch=9999"], "`images_per_epoch` must be at most 400, the number of training images in "
         "toy, but it is 9999."),
        (["toy", "schedule.floor=1.0"], "pre-training toy: `schedule.floor` must be at most `optimizer.lr`, 0.003, "
         "but it is 1.0."),
        (["toy", "backbone=digits_vit"], "`backbone.name` digits_vit classifies ten digits, but toy has 3 classes."),
        (["toy", "backbone.img_size=32", "data.size=32", "augmentation=glyphs"], "pre-training toy: "
         "`augmentation.name` glyphs needs images of 16 pixels, but `data.size` is 32."),
        (["toy", "--out", "a.bin"], None),
        (["toy", "--out", "/proc/nowhere/a.safetensors"], None),
        (["toy", "--threads", "0"], None),
        (["toy", "optimizer.lr=1e30", "optimizer.betas=[0.0, 0.0]", "optimizer.clip_norm=null"], None),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("toy")
def test_a_mistake_is_one_error_message(call: Call, words, sentence):
    answer = call("pretrain", *words)
    assert answer.code == 2
    assert answer.err.count("\n") == 1
    assert answer.err.startswith("fedsweep: ")
    assert "Traceback" not in answer.err
    if sentence is not None:
        assert answer.err == f"fedsweep: {sentence}\n"
    assert not list(Path("data").glob("**/*.safetensors"))


@pytest.mark.usefixtures("toy")
def test_two_processes_cannot_write_the_same_weights(refused: Refused):
    out = Path("data/backbones/toy.safetensors").absolute()
    with exclusively(out):
        assert refused("pretrain", "toy") == f"another `fedsweep pretrain` is writing {out} now."


@pytest.mark.usefixtures("toy")
def test_a_foreign_file_with_the_name_of_the_card_is_not_overwritten(refused: Refused):
    Path("mine.json").write_text("{}")
    sentence = refused("pretrain", "toy", "--out", "mine.safetensors")
    assert sentence == f"{Path('mine.json').absolute()} already exists; delete it or choose another file with `--out`."
    assert Path("mine.json").read_text() == "{}"


@pytest.mark.usefixtures("toy")
def test_a_closed_pipe_is_not_reported_as_a_full_disk(monkeypatch):
    def gone(table: EpochTable, record: object) -> None:
        raise BrokenPipeError

    monkeypatch.setattr(EpochTable, "add", gone)
    with pytest.raises(BrokenPipeError):
        cli.app(["pretrain", "toy"], standalone_mode=False)


@pytest.mark.usefixtures("toy")
def test_a_broken_checkpoint_is_detected(call: Call, refused: Refused):
    path = Path("data/backbones/toy.checkpoint.safetensors")
    path.parent.mkdir()
    path.write_bytes(b"nothing")
    for options in ([], ["--resume"]):
        sentence = refused("pretrain", "toy", *options)
        assert sentence.startswith(f"{path.absolute()} is not a complete checkpoint of a pre-training (")
    path.unlink()
    assert refused("pretrain", "toy", "--resume") == f"`--resume` needs {path.absolute()}, which does not exist."


def test_pre_trainings_are_not_experiments(toy, refused: Refused):
    assert {"toy", "digits_vit", "tinyimagenet_vit"} <= set(available("pretrain"))
    assert not [name for name in available("experiments") if "toy" in name or "pretrain" in name]
    assert find("pretrain", "toy") == Path("experiments/pretrain/toy.yaml").resolve()
    takes = "; to use the pre-training of that name, run `fedsweep pretrain toy`."
    assert refused("run", "toy") == f"there is no experiment `toy`{takes}"
    assert refused("run", "pretrain/toy") == f"there is no experiment `pretrain/toy`{takes}"
    assert refused("tune", "toy") == f"there is no search space `toy`{takes}"
    assert refused("pretrain", "pretrain/toy") == "there is no pre-training `pretrain/toy`; did you mean `toy`?"


FILES = sorted(SHIPPED.glob("*.y*ml"))


def test_all_shipped_files_are_found():
    assert [path.name for path in FILES] == ["digits_vit.yaml", "tinyimagenet_vit.yaml"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_shipped_file_names_every_hyperparameter_and_its_command(path):
    data = read_yaml(path)
    config = PretrainConfig.of(data, path.name)
    assert set(flat(data)) == set(flat(config))
    lines = path.read_text().splitlines()
    assert lines[1].startswith("# ")
    assert lines[1].endswith(".")
    assert any(line.removeprefix("#").strip().startswith(f"fedsweep pretrain {path.stem}") for line in lines)
