"""The output and the exit codes of `fedsweep export` and `fedsweep predict`."""

import csv
import io
import json
import re
from pathlib import Path

import pytest
from PIL import Image

from fedsweep.common.yaml_values import read_yaml
from fedsweep.export.which_trial import find_trial
from fedsweep.export.write import export
from fedsweep.federation.run_config import RunConfig
from fedsweep.results import Store
from tests.cli.conftest import ROOT, Call, Refused
from tests.export.helpers import play

TINY = {
    "federation.rounds": 1,
    "federation.depths": [3],
    "data.domains": ["plain"],
    "data.test_fraction": 0.05,
    "local.steps": 1,
    "local.batch_size": 8,
    "method": "all_small",
}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a results folder with one run."""
    config = RunConfig.of(read_yaml(ROOT / "experiments" / "fedra_digits.yaml"), "test").override(TINY, "test")
    home = Store(tmp_path_factory.mktemp("mlruns"))
    play(home, "fedra_digits", config)
    return home.root


@pytest.fixture(scope="module")
def export_of(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Export the run once, and return the export's folder, which tests must not change."""
    folder = tmp_path_factory.mktemp("exports") / "out"
    export(find_trial(Store(store), "fedra_digits"), folder)
    return folder


@pytest.fixture
def exported(call: Call, export_of: Path) -> Path:
    """Copy the export to the working directory, so that a test may change it."""
    Path("out").symlink_to(export_of)
    return Path("out")


@pytest.fixture
def photos() -> Path:
    folder = Path("photos")
    for name, level in (("3/dark.png", 0), ("3/grey.png", 128), ("5/bright.png", 255)):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (20, 16), (level,) * 3).save(folder / name)
    return folder


def test_export_prints_the_exported_run_and_the_folder(call: Call, store):
    answer = call("export", "fedra_digits", "--to", "out", "--store", str(store))
    assert (answer.code, answer.err) == (0, "")
    assert answer.out.splitlines()[0] == "Exported fedra_digits, trial 20260101-000000-abcd (seed 0)."
    assert answer.out.splitlines()[1].startswith("Written to out: state after round ")
    assert Path("out/export.json").exists()


def test_table_csv_and_json_contain_the_same_predictions(call: Call, exported, photos):
    spoken = call("predict", "out", "photos", "--format", "json", "--top", "2")
    assert (spoken.code, spoken.err) == (0, "")
    told = json.loads(spoken.out)
    assert [one["path"] for one in told["images"]] == ["3/dark.png", "3/grey.png", "5/bright.png"]
    assert (told["broken"], 0 <= told["accuracy"] <= 1) == ([], True)
    rows = list(csv.reader(io.StringIO(call("predict", "out", "photos", "--format", "csv", "--top", "2").out)))
    assert rows[0] == ["path", "class", "probability", "class 2", "probability 2"]
    assert rows[1:] == [
        [one["path"], *(text for each in one["predictions"] for text in (each["class"], f"{each['probability']:.6f}"))]
        for one in told["images"]
    ]
    accuracy, *table = call("predict", "out", "photos", "--top", "2").out.splitlines()
    assert accuracy.startswith(f"Accuracy {told['accuracy']:.2%} on 3 images, with the folders' names as labels. ")
    assert re.search(r"the accuracy/mean of the run \(\d+\.\d\d%\) is a mean over domains\.$", accuracy)
    assert table[0].split() == ["class", "images", "correct", "accuracy"]
    right = {name: sum(row[0][0] == name == row[1] for row in rows[1:]) for name in ("3", "5")}
    assert [line.split() for line in table[1:3]] == [
        ["3", "2", str(right["3"]), f"{right['3'] / 2:.2%}"], ["5", "1", str(right["5"]), f"{right['5']:.2%}"]
    ]  # fmt: skip
    assert [line.split() for line in table[5:8]] == rows[1:]


@pytest.mark.parametrize("labelled", [True, False])
def test_the_predictions_of_many_images_are_counted_by_class(call: Call, exported, labelled):
    for number in range(20):
        path = Path("many") / ("3" if labelled else "unnamed") / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (16, 16), (10 * number,) * 3).save(path)
    answer = call("predict", "out", "many")
    assert answer.code == 0
    assert ".png" not in answer.out
    assert answer.out.startswith("Accuracy ") == labelled
    assert "class  images  correct  accuracy" in answer.out or not labelled
    assert "predicted class  images" in answer.out or labelled
    assert "Use `--format csv` or `--format json` for the prediction of each image.\n" in answer.out
    assert len(call("predict", "out", "many", "--format", "csv").out.splitlines()) == 21


@pytest.mark.parametrize("form", ["table", "csv", "json"])
def test_predictions_are_written_to_the_output_file(call: Call, exported, photos, form):
    printed = call("predict", "out", "photos", "--format", form)
    answer = call("predict", "out", "photos", "--format", form, "--output", "found/photos.txt")
    assert (answer.code, answer.out) == (0, "")
    assert answer.err.startswith("Predictions for 3 images written to found/photos.txt\n")
    written = Path("found/photos.txt").read_text()
    if form == "table":
        rows = [line.split() for line in printed.out.splitlines()[-4:]]
        assert [line.split() for line in written.splitlines()] == rows
    else:
        assert written == printed.out


def test_a_broken_image_is_named_and_the_exit_code_is_one(call: Call, exported, photos):
    (photos / "torn.png").write_bytes(b"no image")
    answer = call("predict", "out", "photos", "--format", "csv")
    assert answer.code == 1
    assert len(answer.out.splitlines()) == 1 + 3
    assert "fedsweep: photos/torn.png cannot be read: not an image, or in an unsupported format.\n" in answer.err


def test_the_folder_of_a_model_version_names_round_and_client():
    from types import SimpleNamespace

    from fedsweep.cli.export import version_of

    card = SimpleNamespace(method="fedag", seed=1, round=7, origin=SimpleNamespace(client="a", key="k"))
    path, tags = version_of(card)  # type: ignore[arg-type]
    assert path == "export-7-a"
    assert tags == {
        "fedsweep.method": "fedag", "fedsweep.seed": "1", "fedsweep.round": "7", "fedsweep.trial": "k"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["export", "fedra_digit", "--to", "new"], "there is no trial `fedra_digit` in {store}; did you mean "
         "`fedra_digits`?"),
        (["export", "fedra_digits", "--to", "here"], "`--to` must be a new or an empty folder, but here is not empty."),
        (["export", "fedra_digits", "--to", "here/file"], "`--to` must be a new or an empty folder, but here/file is a "
         "file."),
        (["export", "fedra_digits", "--to", "here/file/x"], "`--to` must be a new or an empty folder, but "
         "{folder}/here/file, a parent of here/file/x, is a file."),
        (["export", "fedra_digits", "--to", "new", "--client", "plan"], "`--client`: there is no client `plan`; did "
         "you mean `plain`?"),
        (["export", "fedra_digits", "--to", "new", "--register", "a/b"], "`--register` must be a name without `/` and "
         "`:`, but it is `a/b`."),
        (["export", "fedra_digits", "--to", "new", "--register", "a"], "MLflow has no run of trial "
         "20260101-000000-abcd; `fedsweep ui --deliver` creates it."),
    ],
)  # fmt: skip
def test_a_failed_export_writes_nothing(refused: Refused, store, tmp_path, words, sentence):
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "file").write_text("")
    said = refused(*words, "--store", str(store))
    assert said == sentence.format(store=store, folder=tmp_path)
    assert not (tmp_path / "new").exists()
    assert [path.name for path in (tmp_path / "here").iterdir()] == ["file"]
    assert not (store / "mlflow.db").exists()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["predict", "gone", "here"], "there is no folder gone; `fedsweep export TRIAL --to gone` creates it."),
        (["predict", "here", "here"], "the folder here is not an export, because it has no export.json; `fedsweep "
         "export TRIAL --to DIR` creates an export."),
        (["predict", "out", "empty"], "IMAGES must be a folder, but empty does not exist."),
        (["predict", "out", "here", "--format", "xml"], "`--format` must be table, csv or json, but it is `xml`."),
    ],
)  # fmt: skip
def test_an_impossible_prediction_is_rejected(refused: Refused, tmp_path, words, sentence):
    (tmp_path / "here").mkdir()
    Image.new("RGB", (16, 16)).save(tmp_path / "here" / "x.png")
    assert refused(*words) == sentence
