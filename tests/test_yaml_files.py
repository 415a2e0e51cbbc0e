"""Every experiment and search space that ships: complete, valid in every arm, described, with its command."""

from pathlib import Path

import pytest

from fedsweep.config import flat, read_yaml
from fedsweep.experiment import RunConfig
from fedsweep.paths import available
from fedsweep.pretraining import PretrainConfig
from fedsweep.sweep.plan import Plan

ROOT = Path(__file__).parents[1]
PRETRAININGS = sorted((ROOT / "experiments" / "pretrain").rglob("*.y*ml"))
EXPERIMENTS = sorted(set((ROOT / "experiments").rglob("*.y*ml")) - set(PRETRAININGS))
SPACES = sorted((ROOT / "search_spaces").rglob("*.y*ml"))


def name_of(path: Path) -> str:
    return "/".join(path.relative_to(ROOT).with_suffix("").parts[1:]).removeprefix("pretrain/")


def test_all_files_are_seen():
    assert (len(EXPERIMENTS), len(SPACES), len(PRETRAININGS)) == (2, 5, 2)  # a new file changes this line
    assert {path.suffix for path in EXPERIMENTS + SPACES + PRETRAININGS} == {".yaml"}


@pytest.fixture(autouse=True)
def _at_the_root(monkeypatch, pacs):
    monkeypatch.chdir(ROOT)


def dotted(node: dict, prefix: str = "") -> set[str]:
    names = set()
    for key, value in node.items():
        names |= dotted(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {f"{prefix}{key}"}
    return names


@pytest.mark.parametrize("path", EXPERIMENTS, ids=name_of)
def test_an_experiment_resolves_and_names_every_hyperparameter(path):
    assert available("experiments")[name_of(path)] == path
    data = read_yaml(path)
    config = RunConfig.of(data, path.name)
    assert dotted(data) == set(flat(config))


@pytest.mark.parametrize("path", PRETRAININGS, ids=name_of)
def test_a_pre_training_resolves_and_names_every_hyperparameter(path):
    assert available("pretrain")[name_of(path)] == path
    data = read_yaml(path)
    assert dotted(data) == set(flat(PretrainConfig.of(data, path.name)))


@pytest.mark.parametrize("path", SPACES, ids=name_of)
def test_every_arm_of_a_search_space_resolves(path):
    assert available("search_spaces")[name_of(path)] == path
    plan = Plan.read(name_of(path), {}, {})  # resolves all arms, or all ends of a sampled range
    assert plan.num_trials >= 2
    if plan.sampled is None:
        plan.preflight()
        trials = plan.grid()
        assert len(trials) == plan.num_trials == len({trial.key for trial in trials})
        assert plan.space.baseline in [trial.arm for trial in trials]


@pytest.mark.parametrize("path", EXPERIMENTS + SPACES + PRETRAININGS, ids=name_of)
def test_a_file_begins_with_what_it_is_and_how_to_start_it(path):
    lines = path.read_text().splitlines()
    comments = [line.removeprefix("#").strip() for line in lines if line.startswith("#")]
    assert lines[0].startswith("# ")
    assert lines[0].endswith((".", "?"))
    verb = "pretrain" if path in PRETRAININGS else "run" if path in EXPERIMENTS else "tune"
    assert any(f"{line} ".startswith(f"fedsweep {verb} {name_of(path)} ") for line in comments)


def test_the_experiment_on_pacs_takes_the_backbone_that_is_pre_trained_for_it():
    trained = PretrainConfig.of(read_yaml(ROOT / "experiments" / "pretrain" / "tinyimagenet_vit.yaml"), "test").backbone
    used = RunConfig.of(read_yaml(ROOT / "experiments" / "fedra_pacs.yaml"), "test").backbone
    assert used.pretrained == "backbones/tinyimagenet_vit.safetensors"
    same = {"pretrained": "none", "mean": trained.mean, "std": trained.std}
    assert used.model_copy(update=same) == trained
