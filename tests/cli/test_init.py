"""The command `fedsweep init`, and the commands in a project and in the folders below it."""

import json
import os
from pathlib import Path

import pytest
from PIL import Image

from fedsweep.common import paths
from fedsweep.common.config import flat
from fedsweep.common.yaml_values import read_yaml
from fedsweep.federation.run_config import RunConfig
from fedsweep.results import Store
from fedsweep.sweep.plan.plan import Plan
from tests.cli.conftest import Call, Refused

WRITTEN = [".gitignore", "README.md", "experiments", "fedsweep.toml", "schemas", "search_spaces"]


def draw(*folders: str) -> None:
    """Write two small images into each folder of the folder `photos`."""
    for folder in folders:
        path = Path("photos", folder)
        path.mkdir(parents=True)
        for number in range(2):
            Image.new("RGB", (8, 8), (40 * number, 20, 10)).save(path / f"{number}.png")


def names(text: dict, prefix: str = "") -> set[str]:
    """Return the dotted names of all values of a YAML file."""
    nested = [
        names(one, f"{prefix}{key}.") if isinstance(one, dict) else {f"{prefix}{key}"} for key, one in text.items()
    ]
    return {name for found in nested for name in found}


def check_project(folder: str, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    """Check that the experiment of a project names every hyperparameter, that all arms resolve, and the README."""
    monkeypatch.chdir(folder)
    (experiment,) = Path("experiments").iterdir()
    content = read_yaml(experiment)
    config = RunConfig.of(content, experiment.stem)
    assert names(content) == set(flat(config))
    assert Plan.read("lora_rank", {}, {}).num_trials == 9
    readme = Path("README.md").read_text()
    assert len(readme.split("```")[1].splitlines()[1:]) == 6
    assert f"experiments/{experiment.name}" in readme
    lines = [line for line in (*readme.splitlines(), *experiment.read_text().splitlines()) if "--root" not in line]
    assert max(map(len, lines)) <= 120
    return config


def test_without_images_the_project_uses_the_shipped_digits(call: Call, monkeypatch):
    answer = call("init", "study")
    assert (answer.code, answer.err) == (0, "")
    assert answer.out.splitlines()[-1] == "cd study && fedsweep tune lora_rank"
    assert sorted(one.name for one in Path("study").iterdir()) == WRITTEN
    assert check_project("study", monkeypatch).data.name == "digits"
    assert {*Path(".gitignore").read_text().splitlines()[1:]} == {"/mlruns/", "/data/", "/partition-*.png"}


def test_the_working_directory_can_become_a_project(call: Call):
    assert call("init").out.splitlines()[-1] == "fedsweep tune lora_rank"
    assert sorted(one.name for one in Path().iterdir()) == WRITTEN


def test_with_images_the_experiment_has_a_client_for_each_domain(call: Call, monkeypatch):
    draw("a 'quoted' one/cat", "a 'quoted' one/dog", "null/cat", "null/dog", "sketch/cat", "sketch/dog")
    shown = call("init", "my study", "--images", "photos").out
    assert shown.splitlines()[-1] == "cd 'my study' && fedsweep data prepare photos --root ../photos --size 64"
    config = check_project("my study", monkeypatch)
    assert config.data.domains == ("a 'quoted' one", "null", "sketch")
    assert (config.data.set, config.data.size, config.federation.depths) == ("photos", 64, (12, 8, 3))
    assert config.partition.name == "feature_skew"
    first = Path("experiments/photos.yaml").read_text().splitlines()[:2]
    assert first == [
        "# yaml-language-server: $schema=../schemas/experiment.json",
        "# FedRA on 12 images of 2 classes in 3 domains: one client per domain.",
    ]


def test_images_of_one_domain_are_divided_among_four_clients(call: Call, monkeypatch):
    draw("cat", "dog")
    call("init", "study", "--images", "photos")
    config = check_project("study", monkeypatch)
    assert (config.data.domains, config.partition.name) == (("photos",), "label_skew")
    assert config.partition.clients == len(config.federation.depths) == 4
    assert config.federation.depths == (12, 9, 6, 3)
    assert ": 4 clients." in Path("experiments/photos.yaml").read_text()


def test_a_folder_name_that_cannot_name_a_data_set_is_changed(call: Call, monkeypatch):
    draw("cat", "dog")
    Path("photos").rename("Müller's photos (2)")
    shown = call("init", "study", "--images", "Müller's photos (2)").out
    assert "fedsweep data prepare M_ller_s_photos_2 --root" in shown
    assert check_project("study", monkeypatch).data.set == "M_ller_s_photos_2"


@pytest.mark.parametrize("taken", WRITTEN)
def test_no_file_is_overwritten(refused: Refused, taken):
    Path(taken).write_text("mine")
    assert refused("init") == (
        f"`fedsweep init` overwrites nothing, but {Path.cwd()} already contains `{taken}`; name a new folder, as in "
        "`fedsweep init DIR`."
    )
    assert [one.name for one in Path().iterdir()] == [taken]
    assert Path(taken).read_text() == "mine"


def test_mistakes_write_nothing(refused: Refused):
    Path("file").write_text("")
    assert refused("init", "file") == f"DIR must be a folder, but {Path.cwd() / 'file'} is a file."
    assert refused("init", "new", "--images", "none") == (
        f"`--images` must be a folder with images, but {Path.cwd() / 'none'} is not a folder."
    )
    Path("empty").mkdir()
    assert "empty" in refused("init", "new", "--images", "empty")
    assert sorted(one.name for one in Path().iterdir()) == ["empty", "file"]


@pytest.mark.parametrize("folder", ["new/deep", "there"])
def test_an_error_while_writing_leaves_nothing_behind(refused: Refused, monkeypatch, folder):
    Path("there").mkdir()
    Path("there/mine").write_text("mine")
    rename, done = os.rename, []

    def fails_late(source, target):
        if len(done) == 3:
            raise OSError(28, "No space left on device")
        done.append(target)
        rename(source, target)

    monkeypatch.setattr(os, "rename", fails_late)
    assert refused("init", folder) == (
        f"the project cannot be written to {Path.cwd() / folder}: No space left on device."
    )
    assert len(done) == 3
    assert [str(one) for one in sorted(Path().rglob("*"))] == ["there", "there/mine"]


def test_commands_below_the_root_use_the_files_of_the_project(call: Call, monkeypatch, tmp_path):
    call("init", "study")
    below = tmp_path / "study" / "notes" / "deep"
    below.mkdir(parents=True)
    monkeypatch.chdir(below)
    files = json.loads(call("list", "--format", "json").out)["files"]
    assert [one["name"] for one in files if one["own"]] == ["my_digits", "lora_rank"]
    assert "9 trials of my_digits" in call("show", "lora_rank").out
    assert Store.at("mlruns").root == tmp_path / "study" / "mlruns"
    assert Store.at("other").root == below / "other"
    assert paths.data_folder() == tmp_path / "study" / "data"
    assert paths.resolve("data/x") == tmp_path / "study" / "data" / "data" / "x"


def test_the_search_for_a_project_ends_at_the_home_folder_and_at_a_git_repository(monkeypatch, tmp_path):
    below = tmp_path / "home" / "clone" / "src"
    below.mkdir(parents=True)
    monkeypatch.chdir(below)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "fedsweep.toml").touch()
    assert paths.project_folder() == below
    (tmp_path / "home" / "fedsweep.toml").touch()
    assert paths.project_folder() == tmp_path / "home"
    (tmp_path / "home" / "clone" / ".git").mkdir()
    assert paths.project_folder() == below
    (tmp_path / "home" / "clone" / "fedsweep.toml").touch()
    assert paths.project_folder() == tmp_path / "home" / "clone"
    monkeypatch.setenv("FEDSWEEP_HOME", str(tmp_path))
    assert paths.home() == tmp_path


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
def test_the_marker_of_another_user_is_ignored(monkeypatch, tmp_path):
    below = tmp_path / "shared" / "mine"
    below.mkdir(parents=True)
    (tmp_path / "shared" / "fedsweep.toml").touch()
    monkeypatch.chdir(below)
    assert paths.project_folder() == tmp_path / "shared"
    os.chown(tmp_path / "shared", 12345, 12345)
    assert paths.project_folder() == below
