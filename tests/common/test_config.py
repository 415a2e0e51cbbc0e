"""RunConfig: strict types, overrides and error messages."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fedsweep.common.config import Config, flat
from fedsweep.common.errors import UserError
from fedsweep.common.yaml_values import parse_overrides, parse_yaml
from fedsweep.federation.run_config import RunConfig
from fedsweep.methods import AllSmall
from fedsweep.methods.depthfl import DepthFL
from tests.fixtures import EXPERIMENT

REFUSALS = parse_yaml((Path(__file__).parents[1] / "golden" / "refusals.yaml").read_text(), "refusals.yaml")


def test_the_table_of_error_messages_is_read():
    assert len(REFUSALS) == 126


@pytest.mark.parametrize("refused", REFUSALS, ids=lambda refused: " ".join(refused["overrides"]))
def test_an_invalid_run_gives_its_error_message(experiment, refused):
    with pytest.raises(UserError) as refusal:
        experiment.override(parse_overrides(refused["overrides"]), "runs.yaml")
    assert str(refusal.value) == f"runs.yaml: {refused['sentence']}"


def test_values_of_an_arm_that_is_not_validated_need_no_pretrained_library():
    """Fields with a default factory, such as FedAG's CLIP and FedMS's gate, have no value in such an arm."""
    code = (
        "import sys; from pathlib import Path; from fedsweep.common.yaml_values import read_yaml; "
        "from fedsweep.federation.run_config import RunConfig; "
        f"experiment = RunConfig.of(read_yaml(Path({str(EXPERIMENT)!r})), 'test'); "
        "names = [one for method in ('fedag', 'fedms') for one in experiment.tentative({'method': method})]; "
        "print('method.gamma' in names, 'method.global_rounds' in names, "
        "*[one for one in names if one.startswith(('method.clip', 'method.gate'))], "
        "*[one for one in ('transformers', 'timm') if one in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "True"]


def test_the_error_names_a_missing_hyperparameter(experiment):
    data = experiment.model_dump(mode="json")
    del data["optimizer"]
    with pytest.raises(UserError, match=r"^runs.yaml: `optimizer` is missing\.$"):
        RunConfig.of(data, "runs.yaml")
    data["data"] = {"name": "prepared", "set": "pacs"}
    data["optimizer"] = {}
    with pytest.raises(UserError) as refusal:
        RunConfig.of(data, "runs.yaml")
    assert str(refusal.value).splitlines() == [
        "runs.yaml has 2 mistakes:",
        "- `data.domains` is missing.",
        "- `optimizer` must have a `name`.",
    ]


def test_a_misspelt_required_name_is_reported_as_unknown(experiment):
    data = experiment.model_dump(mode="json")
    data["optimzer"] = data.pop("optimizer")
    with pytest.raises(UserError, match=r"^runs.yaml: `optimzer` is not a hyperparameter .*; did you mean `optimizer`"):
        RunConfig.of(data, "runs.yaml")


def test_a_missing_name_is_reported_beside_an_unknown_name_that_is_not_similar(experiment):
    data = experiment.model_dump(mode="json")
    data["data"] = {"name": "prepared", "set": "pacs", "zzz": 1}
    data["lora"] |= {"domain": 1}
    with pytest.raises(UserError) as refusal:
        RunConfig.of(data, "runs.yaml")
    assert "- `data.domains` is missing." in str(refusal.value).splitlines()


def test_an_invalid_value_is_reported_before_an_unknown_name(experiment):
    with pytest.raises(UserError) as refusal:
        experiment.override({"zzz": 1, "lora.rank": 0}, "runs.yaml")
    assert str(refusal.value).splitlines() == [
        "runs.yaml has 2 mistakes:",
        "- `lora.rank` must be greater than 0, but it is 0.",
        "- `zzz` is not a hyperparameter of this run.",
    ]


class Triple(Config):
    """A configuration with several required fields."""

    first: int
    second: int
    third: int


@pytest.mark.parametrize("wrong", [["second"], ["first", "third"], ["first", "second", "third"]])
def test_several_mistakes_are_a_list_with_one_line_for_each(wrong):
    data = {name: "x" if name in wrong else 1 for name in Triple.model_fields}
    with pytest.raises(UserError) as refusal:
        Triple.of(data, "a file")
    lines = [f'`{name}` must be an integer, but it is "x".' for name in wrong]
    expected = [f"a file has {len(wrong)} mistakes:", *(f"- {line}" for line in lines)]
    assert str(refusal.value).splitlines() == (expected if len(wrong) > 1 else [f"a file: {lines[0]}"])


def test_a_value_outside_json_is_rejected(experiment):
    recursive: list = []
    recursive.append(recursive)
    for value in (object(), recursive):
        with pytest.raises(UserError, match=r"^runs.yaml contains a value that no hyperparameter can have: .*\.$"):
            experiment.override({"seed": value}, "runs.yaml")


@pytest.mark.parametrize("character", ["\0", "\a", "\x1b", "\x7f", "\x85", "\ufffe", "\ud800"])
def test_a_control_character_in_a_value_is_rejected(experiment, character):
    with pytest.raises(UserError) as refusal:
        experiment.override({"data.domains": ["photo", f"ske{character}tch"]}, "runs.yaml")
    shown = json.dumps(f"ske{character}tch")
    rule = f"must not contain control characters, but it contains U+{ord(character):04X} in {shown}"
    assert str(refusal.value) == f"runs.yaml: `data.domains` {rule}."


@pytest.mark.parametrize(
    "changes",
    [
        {"lora.rank": 1}, {"lora.rank": 64}, {"federation.depths": [1, 12, 1, 12, 1, 12]}, {"lora.dropout": 0},
        {"federation.clients_per_round": 6}, {"local.steps": 1}, {"local.steps": "min_client"}, {"optimizer.lr": 1},
        {"optimizer.clip_norm": None}, {"method.missing_layers": "ensure_cover", "federation.clients_per_round": 3},
    ],
)  # fmt: skip
def test_the_edges_of_the_ranges_are_allowed(experiment, changes):
    changed = flat(experiment.override(changes, "test"))
    assert {name: changed[name] for name in changes} == changes


def test_an_override_changes_only_the_named_value(experiment):
    before = flat(experiment)
    after = flat(experiment.override({"lora.rank": 4, "federation.depths": [6] * 6}, "test"))
    assert {name for name in before if before[name] != after[name]} == {"lora.rank", "federation.depths"}
    assert (after["lora.rank"], after["federation.depths"]) == (4, [6] * 6)
    assert flat(experiment) == before


def test_an_empty_override_gives_an_equal_run(experiment):
    assert experiment.override({}, "test") == experiment
    assert experiment.override(flat(experiment), "test") == experiment


def test_a_bare_string_selects_a_method_with_its_defaults(experiment):
    assert experiment.override({"method": "all_small"}, "test").method == AllSmall()
    assert experiment.override({"method": "depthfl"}, "test").method == DepthFL()
    covered = experiment.override({"method.missing_layers": "ensure_cover"}, "test")
    assert covered.override({"method": "fedra"}, "test").method.missing_layers == "keep_previous"


def test_a_record_is_replaced_before_its_fields_in_any_order(experiment):
    changes = {"method.missing_layers": "ensure_cover", "method": "fedra"}
    for order in (changes, dict(reversed(changes.items()))):
        assert experiment.override(order, "test").method.missing_layers == "ensure_cover"
    scaled = experiment.override({"lora": {"alpha": 16.0}, "lora.rank": 4}, "test")
    assert (scaled.lora.alpha, scaled.lora.scaling, scaled.lora.rank, scaled.lora.position) == (16.0, None, 4, "both")


def test_flat_maps_every_dotted_name_to_its_value(experiment):
    values = flat(experiment)
    assert values["lora.rank"] == 8
    assert values["federation.depths"] == [12, 10, 8, 6, 4, 3]
    assert values["federation.clients_per_round"] is None
    assert values["method.name"] == "fedra"
    assert values["optimizer.weight_decay"] == 1e-5
    assert len(values) == 54
    assert json.loads(json.dumps(values)) == values


def test_a_run_is_frozen_and_can_be_a_key(experiment):
    with pytest.raises(ValueError, match="frozen"):
        experiment.seed = 1
    assert hash(experiment) == hash(experiment.override({}, "test"))
    assert len({experiment, experiment.override({"seed": 1}, "test")}) == 2


def test_a_bare_name_selects_a_record_at_any_depth(experiment):
    changes = {
        "partition.proxy_share": 0.1,
        "method": "fedbrick",
        "method.over": "depthfl",
        "method.over.heads": [2, 5],
    }
    method = experiment.override(changes, "test").method
    assert (method.name, method.over.name, method.over.heads) == ("fedbrick", "depthfl", (2, 5))
    spelt = {"name": "fedbrick", "over": {"name": "depthfl", "heads": [2, 5]}}
    assert experiment.override({"partition.proxy_share": 0.1, "method": spelt}, "test").method == method
    half = {
        "partition.proxy_share": 0.1,
        "method": {"name": "fedbrick", "over": "inclusivefl"},
        "method.over.beta": 0.5,
    }
    assert experiment.override(half, "test").method.over.beta == 0.5
    of_default = {"partition.proxy_share": 0.1, "method": "fedbrick", "method.over.missing_layers": "ensure_cover"}
    assert experiment.override(of_default, "test").method.over.missing_layers == "ensure_cover"
    written = experiment.model_dump(mode="json") | {"method": "depthfl"}
    assert RunConfig.of(written, "a file") == experiment.override({"method": "depthfl"}, "test")


def test_override_does_not_modify_the_given_values(experiment):
    arm = {"method": {"name": "fedbrick", "server_epochs": 0}}
    changed = experiment.override({**arm, "method.over": "depthfl"}, "test")
    assert changed.method.over == DepthFL()
    assert arm == {"method": {"name": "fedbrick", "server_epochs": 0}}


def test_the_error_names_the_change_that_replaced_the_parent(experiment):
    with pytest.raises(UserError, match="`method` must be a mapping of names to values, but it is null"):
        experiment.override({"method": None, "method.missing_layers": "keep_previous"}, "test")
    with pytest.raises(UserError, match=r"`lora\.rank\.x` is not a hyperparameter"):
        experiment.override({"lora.rank": "a", "lora.rank.x": 1}, "test")
