"""The shipped experiments and search spaces, which must be complete and valid in every arm."""

import json
import os
import re
from pathlib import Path

import pytest
import torch

from fedsweep.common.config import flat
from fedsweep.common.errors import UserError
from fedsweep.common.paths import available, summary
from fedsweep.common.yaml_values import parse_overrides, read_yaml
from fedsweep.federation.run_config import RunConfig
from fedsweep.models.clip.model import FeatureAdapter
from fedsweep.pretraining.config import PretrainConfig
from fedsweep.results.arms import counterparts, identity
from fedsweep.sweep.plan.plan import Plan
from fedsweep.sweep.space.search_space import SearchSpace

pytestmark = pytest.mark.usefixtures("read_once", "listed_once")

ROOT = Path(__file__).parents[1]
PRETRAININGS = sorted((ROOT / "experiments" / "pretrain").rglob("*.y*ml"))
EXPERIMENTS = sorted(set((ROOT / "experiments").rglob("*.y*ml")) - set(PRETRAININGS))
SPACES = sorted((ROOT / "search_spaces").rglob("*.y*ml"))
PAPERS = ROOT / "search_spaces" / "papers"
COUNTED = [path for path in SPACES if re.search(r"(?m)^measure:", path.read_text())]
COMPARED = [path for path in SPACES if re.search(r"(?m)^reference:", path.read_text()) and path not in COUNTED]
OF_FEDMS = ["food101", "eurosat", "ucf101"]
OF_FEDAG = ["domainnet345", "office_home", "imageclef"]
WIDTHS = {"digits": 64, "pacs": 128} | dict.fromkeys(["office_home", "imageclef", "domainnet"], 512)
"""Number of features of FedAG's CLIP by data set: digits_clip, that of scripts/train_tinyimagenet_clip.py, and B/32."""
PRINTED = {"Clipart": 607.38, "p": 867.14, "infograph": 374.87, "quickdraw": 146.44, "sketch": 558.15}
"""For each domain in Table 2 of the paper, the sum of the printed accuracies over the methods, in percent."""
UNCOMPARED = ["ablations/leave_one_domain_out", "papers/fedag/fig1_digits", "papers/fedag/fig1_domainnet"]
"""Grids without a baseline, because their arms are tested on different images."""
ELSEWHERE = dict.fromkeys(["domainnet", "nico", *OF_FEDMS, *OF_FEDAG], 224) | {"usps": 16}
"""Data sets that no test prepares, with the size of their images in pixels."""
OTHER_EXPERIMENTS = [
    line.removeprefix("#   fedsweep tune ")
    for path in SPACES
    for line in path.read_text().splitlines()
    if line.startswith("#   fedsweep tune ") and "--experiment" in line
]
"""The commands in the first lines of search spaces that name another experiment, without `fedsweep tune`."""


def name_of(path: Path) -> str:
    return "/".join(path.relative_to(ROOT).with_suffix("").parts[1:]).removeprefix("pretrain/")


def schema_of(path: Path) -> str:
    """Return the path of the JSON schema of a file, relative to the folder of the file."""
    kind = "search_space" if path in SPACES else "pretrain" if path in PRETRAININGS else "experiment"
    return os.path.relpath(ROOT / "schemas" / f"{kind}.json", path.parent)


def test_all_files_are_found():
    assert (len(EXPERIMENTS), len(SPACES), len(PRETRAININGS)) == (20, 191, 2)  # a new file changes these counts
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
def test_an_experiment_is_valid_and_names_every_hyperparameter(path):
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
    # All arms, or all bounds of sampled ranges, with one seed; seeds have the same effect in every space.
    plan = Plan.read(name_of(path), {}, {"seeds": [0]})
    assert plan.num_trials * len(read_yaml(path)["seeds"]) >= 2
    assert plan.num_trials <= plan.space.most_trials()
    if plan.space.design == "full" and not any(axis.conditions for axis in plan.space.space.values()):
        assert plan.num_trials == plan.space.most_trials()
    if plan.sampled is not None:
        return
    arms = plan.arms
    if name_of(path) in UNCOMPARED:
        assert plan.space.baseline is None
    else:
        found = counterparts(arms, plan.space.baseline)
        assert any(found[identity(one)] == one for one in arms)
        assert len(found) == len(arms)
    name = getattr(plan.base.data, "set", plan.base.data.name)
    if name in ELSEWHERE:
        command = f"fedsweep data prepare {name} --root DIR --size {ELSEWHERE[name]}"
        with pytest.raises(UserError, match=f"run `{command}` to prepare it"):
            plan.preflight()
    else:
        plan.preflight()
        trials = plan.grid()
        assert len(trials) == plan.num_trials == len({trial.key for trial in trials})


@pytest.mark.parametrize("command", OTHER_EXPERIMENTS)
def test_every_arm_resolves_with_the_other_experiment_of_a_command(command):
    name, option, experiment, *overrides = command.split()
    assert option == "--experiment"
    plan = Plan.read(name, parse_overrides(overrides), {"experiment": experiment, "seeds": [0]})
    assert plan.space.experiment == experiment
    assert not [one for one in plan.unnamed_changes() if one.startswith("scaling")]


def test_every_file_begins_with_a_description_and_a_command():
    for verb, paths in {"run": EXPERIMENTS, "tune": SPACES, "pretrain": PRETRAININGS}.items():
        for path in paths:
            lines = path.read_text().splitlines()
            comments = [line.removeprefix("#").strip() for line in lines if line.startswith("#")]
            assert lines[0] == f"# yaml-language-server: $schema={schema_of(path)}", path
            assert lines[1].startswith("# "), path
            assert lines[1].endswith((".", "?")), path
            assert summary(path) == lines[1].removeprefix("# "), path
            assert any(f"{line} ".startswith(f"fedsweep {verb} {name_of(path)} ") for line in comments), path


def test_the_experiment_on_pacs_uses_the_backbone_pre_trained_for_it():
    trained = PretrainConfig.of(read_yaml(ROOT / "experiments" / "pretrain" / "tinyimagenet_vit.yaml"), "test").backbone
    used = RunConfig.of(read_yaml(ROOT / "experiments" / "fedra_pacs.yaml"), "test").backbone
    assert used.pretrained == "backbones/tinyimagenet_vit.safetensors"
    same = {"pretrained": "none", "mean": trained.mean, "std": trained.std}
    assert used.model_copy(update=same) == trained


def changed(one: str, other: str) -> set[str]:
    """Return the names of the hyperparameters in which two experiments differ."""
    left, right = (flat(RunConfig.of(read_yaml(ROOT / "experiments" / f"{name}.yaml"), name)) for name in (one, other))
    return {name for name in left | right if left.get(name) != right.get(name)}


@pytest.mark.parametrize("data", ["domainnet", "nico"])
def test_the_first_lines_of_released_experiments_list_their_differences_from_the_paper(data):
    names = {"backbone.model", "backbone.mean", "backbone.std", "lora.patch_embed", "local.steps"}
    assert changed(f"fedra_{data}", f"fedra_{data}_released") == names | {"aggregation.weights"}


def test_the_experiments_of_the_paper_differ_in_their_images_only():
    assert changed("fedra_domainnet", "fedra_nico") == {"data.set", "data.domains"}
    assert changed("fedra_domainnet_released", "fedra_nico_released") == {"data.set", "data.domains"}
    for data in OF_FEDMS[1:]:
        assert changed("fedms_food101", f"fedms_{data}") == {"data.set", "data.domains"}


def printed(name: str) -> dict[str, dict[str, float]]:
    """Return the values that a paper prints, keyed by the text of the arm, from the search space papers/`name`."""
    arms = read_yaml(PAPERS / f"{name}.yaml")["reference"]["arms"]
    return {json.dumps(one["arm"], sort_keys=True): one["values"] for one in arms}


def arm(**names: object) -> str:
    return json.dumps({name.replace("__", "."): value for name, value in names.items()}, sort_keys=True)


def test_the_files_with_values_of_a_paper_are_found():
    arms = {"fedag": 39, "fedra": 84, "fedbrick": 28, "fedms": 24}
    assert {path.parent.name for path in COMPARED} == set(arms)
    counted = ["papers/fedbrick/table3", *(f"papers/fedms/{name}" for name in ("fig7", "table1", "table2", "table4"))]
    assert [name_of(path) for path in COUNTED] == counted
    for paper, count in arms.items():
        files = [path for path in COMPARED if path.parent == PAPERS / paper]
        assert len(files) == {"fedag": 5, "fedra": 15, "fedbrick": 6, "fedms": 12}[paper]
        assert sum(len(printed(name_of(path).removeprefix("papers/"))) for path in files) == count


OF_CLIENTS = [path for path in COMPARED if path.parent.name == "fedms"]
OF_DOMAINS = [path for path in COMPARED if path.parent.name in ("fedra", "fedbrick")]


@pytest.mark.parametrize("path", OF_DOMAINS, ids=name_of)
def test_values_of_a_paper_cover_all_arms_and_domains_and_agree_with_its_averages(path):
    space = SearchSpace.of(read_yaml(path), path.name)
    reference = printed(name_of(path).removeprefix("papers/"))
    assert list(reference) == [json.dumps(one, sort_keys=True) for one in space.arms(dict)]
    experiment = read_yaml(ROOT / "experiments" / f"{space.experiment}.yaml")
    domains = [f"accuracy/domain/{domain}" for domain in experiment["data"]["domains"]]
    assert len(domains) == 6
    for values in reference.values():
        assert list(values) == ["accuracy/mean", *domains]
        # Both papers round values and averages to two decimals, so averages agree up to rounding.
        assert values["accuracy/mean"] == pytest.approx(sum(values[name] for name in domains) / 6, abs=0.011)


@pytest.mark.parametrize("path", OF_CLIENTS, ids=name_of)
def test_values_of_fedms_are_of_the_clients_mean_which_is_the_compared_metric(path):
    space = SearchSpace.of(read_yaml(path), path.name)
    for values in printed(name_of(path).removeprefix("papers/")).values():
        assert list(values) == [space.objective.metric] == ["accuracy/clients/mean"]


@pytest.mark.parametrize("data", ["office_home", "imageclef", "domainnet"])
def test_values_of_fedag_cover_all_arms_and_held_out_domains(data):
    path = PAPERS / "fedag" / f"table2_{data}.yaml"
    space = SearchSpace.of(read_yaml(path), path.name)
    experiment = read_yaml(ROOT / "experiments" / f"{space.experiment}.yaml")
    held_out = [f"accuracy/out_of_domain/{domain}" for domain in experiment["data"]["held_out_domains"]]
    reference = printed(f"fedag/table2_{data}")
    assert list(reference) == [json.dumps(one) for one in space.arms(dict)]
    assert all(list(values) == held_out for values in reference.values())
    best = {name: max(values[name] for values in reference.values()) for name in held_out}
    assert reference[arm(arm="FedAG")] == best  # the paper's text states that FedAG is best on each domain
    total = {name.rsplit("/", 1)[1]: sum(values[name] for values in reference.values()) for name in held_out}
    assert total == pytest.approx({name: PRINTED[name] for name in total}, abs=1e-6)


@pytest.mark.parametrize("table", ["table1", "table2"])
@pytest.mark.parametrize("data", WIDTHS)
def test_baselines_of_fedag_have_its_parameters_prompt_and_steps(table, data):
    plan = Plan.read(f"papers/fedag/{table}_{data}", {}, {})
    arms = {one["arm"]: plan.resolve(one, seed=0) for one in plan.arms}
    assert len(arms) == 11
    full, adapter = arms["FedAG"], arms["CLIP-adapter centralized"]
    domains = len(full.data.training_domains)
    own = count_adapter(WIDTHS[data], full.method.adapters.hidden) * domains
    assert count_adapter(WIDTHS[data], adapter.method.hidden) == pytest.approx(own, rel=0.01)
    for name, config in arms.items():
        together = full.local.steps * domains if isinstance(full.local.steps, int) else full.local.steps
        assert config.local.steps == (together if name.endswith("centralized") else full.local.steps)
        assert getattr(config.backbone, "prompt", full.method.clip.prompt) == full.method.clip.prompt
        assert config.partition.proxy_share == full.partition.proxy_share
        assert config.federation == full.federation


def count_adapter(width: int, hidden: int | None) -> int:
    """Return the number of parameters of FedAG's adapter of two linear layers, counted from their shapes."""
    return sum(one.numel() for one in FeatureAdapter(width, hidden, torch.device("meta"), 0, "counted").parameters())


def test_tables_of_fedag_agree_on_common_runs():
    inside, outside, components = (printed(f"fedag/table{number}_domainnet") for number in (1, 2, 3))
    full = components[arm(without=[])]
    assert full == inside[arm(arm="FedAG")] | outside[arm(arm="FedAG")]
    assert all(values[name] < full[name] for values in components.values() if values != full for name in full)


def test_the_experiments_of_fedag_differ_in_their_images_only():
    for data in ("imageclef", "domainnet"):
        names = {name.split(".")[0] for name in changed("fedag_office_home", f"fedag_{data}")}
        assert names == {"data", "synthetic"}
    small = {name.split(".")[0] for name in changed("fedag_digits", "fedag_pacs")}
    assert small <= {"data", "backbone", "method", "federation"}


def test_values_of_fedms_agree_on_common_runs():
    default = printed("fedms/table3_eurosat")[arm(method__gate__trained="adapter")]
    assert default in printed("fedms/fig4_eurosat").values()  # Fig. 4 contains the same run, with alpha = 1
    slow = printed("fedms/fig12_ucf101")[arm(optimizer__lr=2e-5)]["accuracy/clients/mean"]
    loss = printed("fedms/table3_ucf101")[arm(method__gate__trained="adapter")]["accuracy/clients/mean"] - slow
    assert loss == pytest.approx(16.72)  # the loss that the paper's text states, in percentage points


WITH_BASELINES = [path for path in SPACES if "promptfl" in path.read_text() and path not in COUNTED]


@pytest.mark.parametrize("path", WITH_BASELINES, ids=name_of)
def test_fedms_next_to_its_baselines_is_the_experiment_itself(path):
    plan = Plan.read(name_of(path), {}, {})
    arms = [(one, plan.resolve(one, seed=0)) for one in plan.arms]
    assert {config.method.name for _, config in arms} == {"fedms", "ft", "lfft", "promptfl"}
    for _, config in arms:
        own = plan.base.optimizer.model_dump() | {"lr": config.optimizer.lr}  # for whole blocks, lr may be smaller
        assert (config.optimizer.model_dump() == own) == (config.method.name != "promptfl")
        assert config.optimizer.lr == plan.base.optimizer.lr or config.method.name != "fedms"
        assert (config.method == plan.base.method) == (config.method.name == "fedms")


def test_tables_of_fedra_agree_on_common_runs():
    table1, table4, table6 = (printed(f"fedra/table{number}_nico") for number in (1, 4, 6))
    assert table4[arm(method="all_large")] == table1[arm(method="all_large")]
    assert table4[arm(method={"name": "all_small", "depth": 3})] == table1[arm(method="all_small")]
    for method in ("inclusivefl", "fedra"):
        assert table6[arm(lora__position="both", method=method)] == table1[arm(method=method)]
    table3, table5 = printed("fedra/table3_nico"), printed("fedra/table5_nico")
    kept = {name: values for name, values in table5.items() if "keep_previous" in name}
    assert len(kept) == 4
    assert list(kept.values()) == [values for name, values in table3.items() if '"fedra"' in name]


def test_the_guide_names_every_search_space_of_the_papers():
    text = (ROOT / "docs" / "guides" / "papers.md").read_text()
    _, fedag, fedbrick, fedms, fedra = re.split(r"^## Fed(?:AG|BRICK|MS|RA)$", text, flags=re.MULTILINE)
    for paper, section, count in (
        ("fedag", fedag, 18),
        ("fedbrick", fedbrick, 22),
        ("fedms", fedms, 42),
        ("fedra", fedra, 49),
    ):
        named = set(re.findall(r"`((?:table\d|fig\d+|supplement)(?:_\w+)?)`", section))
        assert named == {path.stem for path in (PAPERS / paper).glob("*.yaml")}
        assert len(named) == count
