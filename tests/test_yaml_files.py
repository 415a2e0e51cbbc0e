"""Every experiment and search space that ships: complete, valid in every arm, described, with its command."""

from pathlib import Path

import pytest

from fedsweep.config import flat, read_yaml
from fedsweep.experiment import RunConfig
from fedsweep.paths import available
from fedsweep.sweep.plan import Plan

ROOT = Path(__file__).parents[1]
EXPERIMENTS = sorted((ROOT / "experiments").rglob("*.y*ml"))
SPACES = sorted((ROOT / "search_spaces").rglob("*.y*ml"))


def name_of(path: Path) -> str:
    return "/".join(path.relative_to(ROOT).with_suffix("").parts[1:])


def test_all_files_are_seen():
    assert (len(EXPERIMENTS), len(SPACES)) == (1, 3)  # a new file changes this line
    assert {path.suffix for path in EXPERIMENTS + SPACES} == {".yaml"}


@pytest.fixture(autouse=True)
def _at_the_root(monkeypatch):
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


@pytest.mark.parametrize("path", SPACES, ids=name_of)
def test_every_arm_of_a_search_space_resolves(path):
    assert available("search_spaces")[name_of(path)] == path
    plan = Plan.read(name_of(path), {}, {})  # resolves all arms, or all ends of a sampled range
    assert plan.num_trials >= 2
    if plan.sampled is None:
        trials = plan.grid()
        assert len(trials) == plan.num_trials == len({trial.key for trial in trials})
        assert plan.space.baseline in [trial.arm for trial in trials]


@pytest.mark.parametrize("path", EXPERIMENTS + SPACES, ids=name_of)
def test_a_file_begins_with_what_it_is_and_how_to_start_it(path):
    lines = path.read_text().splitlines()
    comments = [line.removeprefix("#").strip() for line in lines if line.startswith("#")]
    assert lines[0].startswith("# ")
    assert lines[0].endswith((".", "?"))
    assert f"fedsweep {'run' if path in EXPERIMENTS else 'tune'} {name_of(path)}" in comments
