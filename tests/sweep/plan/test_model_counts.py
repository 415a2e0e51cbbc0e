"""Parameter counts without training, which equal the papers' tables and the metrics of a round."""

import json
import re
from pathlib import Path

import pytest

from fedsweep.common.errors import UserError
from fedsweep.common.yaml_values import read_yaml
from fedsweep.federation.rounds import federate
from fedsweep.sweep.plan.model_counts import Counted, count_parameters
from fedsweep.sweep.plan.plan import Plan
from fedsweep.training.costs import transmission_seconds
from tests.sweep.helpers import fedsweep

ROOT = Path(__file__).parents[3]
GOLDEN = json.loads((ROOT / "tests" / "golden" / "counts.json").read_text())
SPACE = "papers/fedbrick/table3"


@pytest.fixture
def plan(monkeypatch, tmp_path) -> Plan:
    monkeypatch.setenv("FEDSWEEP_DATA", str(tmp_path / "none"))  # neither images nor weights
    return Plan.read(SPACE, {}, {})


@pytest.mark.parametrize("place", [0, 1], ids=["vit", "mixer"])
def test_table_3_is_counted_exactly(plan, place):
    expected = GOLDEN[("vit_b16", "mixer_b16")[place]]
    arm = plan.arms[place]
    counted = count_parameters(plan.resolve(arm, 0), 100)
    assert counted.parameters == {
        "parameters/all": expected["all_with_lora_r8_both_and_100_classes"],
        "parameters/block": expected["block"],
        "parameters/lora_per_block": expected["lora_r8_both_per_block"],
        "parameters/head": expected["head_100_classes"],
        "parameters/brick": 24_576,
        "parameters/backbone": expected["all_with_lora_r8_both_and_100_classes"]
        - 12 * expected["lora_r8_both_per_block"],
    }
    for name in plan.reference.metrics():  # the paper prints three digits, some truncated and some rounded
        assert counted.parameters[name] == pytest.approx(plan.reference.value(arm, name), rel=0.01)


def test_the_upload_of_the_smallest_client_equals_the_papers(plan):
    counted = count_parameters(plan.resolve(plan.arms[0], 0), 100)
    assert [one.depth for one in counted.clients] == [12, 10, 8, 6, 5, 4]
    assert counted.clients[-1].bytes_up == 1_087_688  # "1.08MB (bf16)"
    assert {one.bricks for one in counted.clients} == {12 * 24_576}
    shares = [one.bricks / (one.held - one.bricks) for one in counted.clients]
    assert (f"{shares[0]:.1%}", f"{shares[-1]:.1%}") == ("0.3%", "1.0%")


FEDMS = GOLDEN["fedms"]


def counted_by_arm(name: str) -> dict[str, Counted]:
    plan = Plan.read(name, {}, {})
    return {
        json.dumps(arm, sort_keys=True): count_parameters(plan.resolve(arm, 0), plan.space.measure.classes)
        for arm in plan.arms
    }


def test_fedms_tables_1_and_4_and_figure_7_are_counted_exactly(plan):
    arms = counted_by_arm("papers/fedms/table1")
    fedms, ft, lfft, promptfl = (arms[f'{{"method": "{name}"}}'] for name in ("fedms", "ft", "lfft", "promptfl"))
    stage_1, stage_2 = fedms.clients
    assert fedms.parameters["parameters/backbone"] == ft.clients[0].trained == FEDMS["clip_vit_b16"]
    assert stage_1.trained == stage_1.sent == FEDMS["lora_r1_mlp"]
    assert round(fedms.shares["percent/trained"], 4) == FEDMS["percent_stage_1"]
    assert fedms.parameters["parameters/gate_adapter"] == FEDMS["gate_adapter"]
    assert fedms.parameters["parameters/gate"] == FEDMS["gate"]
    assert stage_2.trained == FEDMS["lora_r1_mlp"] + FEDMS["gate_adapter"]
    assert stage_2.sent == FEDMS["gate_adapter"] + 2 * 512 + 2  # with the batch norms' running statistics
    assert (lfft.clients[0].trained, promptfl.clients[0].trained) == (62_099_457, 16 * 512)
    assert round(ft.clients[0].seconds(0.1), 1) == ft_seconds() == FEDMS["seconds_ft_0.1MBps"]
    half = 4 * ft.clients[0].sent // 2  # the paper's LFFT is half of all parameters
    assert round(transmission_seconds(half, 0.1), 1) == FEDMS["seconds_half_frozen_0.1MBps"]
    assert [round(promptfl.clients[0].seconds(speed), 4) for speed in (0.1, 1, 10)] == [0.3277, 0.0328, 0.0033]


@pytest.mark.parametrize(
    ("of_stage_one", "rounds", "stages"), [(1, 2, ["stage 1", "stage 2"]), (0, 1, ["stage 2"]), (3, 3, ["stage 1"])]
)
def test_stages_without_rounds_are_not_counted(experiment, of_stage_one, rounds, stages):
    method = {"name": "fedms", "global_rounds": of_stage_one, "gate": {"trunk": {"name": "digits_resnet"}}}
    changes = {"method": method, "backbone": "digits_clip", "lora.position": "mlp", "federation.depths": [6]}
    shares = {"partition.validation_share": 0.1, "federation.rounds": rounds}
    counted = count_parameters(experiment.override({**changes, **shares}, "test"), 10)
    assert [one.stage for one in counted.clients] == stages
    suffixes = ["/stage_2" if stage == "stage 2" else "" for stage in stages]
    names = ("percent/trained", "seconds/0.1MBps", "seconds/1MBps", "seconds/10MBps")
    assert set(counted.shares) == {f"{name}{suffix}" for name in names for suffix in suffixes}


def ft_seconds() -> float:
    figure_7 = counted_by_arm("papers/fedms/fig7")
    return round(next(one for arm, one in figure_7.items() if '"ft"' in arm).shares["seconds/0.1MBps"], 1)


def test_fedms_table_2_is_counted_exactly(plan):
    mixture, single = counted_by_arm("papers/fedms/table2").values()
    assert mixture.parameters["parameters/mixture"] == FEDMS["two_experts_and_gate"]
    assert single.parameters["parameters/backbone"] == FEDMS["clip_vit_l14"]
    assert round(1 - FEDMS["two_experts_and_gate"] / FEDMS["clip_vit_l14"], 4) == 0.2735  # the paper prints 27.33 %


METHODS = [
    *({"name": name} for name in ("all_large", "all_small", "inclusivefl", "fedbrick")),
    {"name": "fedra", "missing_layers": "ensure_cover"},
    {"name": "fedbrick", "parallel": False},
    {"name": "fedbrick", "over": {"name": "depthfl"}},
]


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_counts_of_clients_equal_those_of_a_round(federation, tiny, method):
    changes = {"method": method, "partition.proxy_share": 0.2, "federation.depths": [9, 6, 3], "federation.rounds": 1}
    _, result = federate(federation(changes, train=24, test=2))
    clients = count_parameters(tiny.override(changes, "test"), 10).clients
    assert [one.depth for one in clients] == {"all_small": [3], "all_large": [12]}.get(method["name"], [9, 6, 3])
    times = 3 // len(clients)
    assert sum(one.held for one in clients) / len(clients) == result.metrics["parameters/held"]
    assert (
        times * sum(one.bytes_up for one in clients) == result.metrics["bytes/up"] / 2
    )  # the metric counts float32, the client bfloat16


def test_every_dynamic_depth_is_counted_and_a_frozen_a_is_not_sent(tiny):
    dynamic = {"federation.depths": "dynamic", "partition.proxy_share": 0.2, "method": "fedbrick"}
    plain, frozen = (
        count_parameters(tiny.override({**dynamic, "aggregation.lora": rule}, "test"), 10)
        for rule in ("factors", "freeze_a")
    )
    assert [one.depth for one in plain.clients] == list(range(12, 0, -1))
    assert frozen.parameters == plain.parameters
    assert frozen.clients[0].bytes_up < plain.clients[0].bytes_up


@pytest.mark.slow
def test_the_command_prints_the_counts_and_records_nothing(tmp_path):
    shown = fedsweep(tmp_path, "tune", SPACE).stdout
    numbers = set(re.findall(r"[\d,.]+[MK]?", shown))
    assert {"86,391,652", "59,612,692", "24,576", "1,087,688", "86.4M", "24.5K"} <= numbers
    assert not (tmp_path / "mlruns").exists()
    assert fedsweep(tmp_path, "show", SPACE).stdout == shown


def test_counts_need_a_grid_and_a_reference_needs_counted_metrics(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = read_yaml(ROOT / "search_spaces" / f"{SPACE}.yaml")
    path = tmp_path / "search_spaces" / "mine.yaml"
    path.parent.mkdir()
    given["reference"]["arms"][0]["values"] = {"parameters/bricks": 1.0}
    path.write_text(json.dumps(given))
    with pytest.raises(
        UserError, match=r"`reference` parameters/bricks is not reported .*did you mean `parameters/brick`"
    ):
        Plan.read("mine", {}, {})
    sampled = {"search": {"name": "random"}, "space": {"method.rank": {"choice": [1, 2]}}, "seeds": [0]}
    path.write_text(json.dumps({name: given[name] for name in ("experiment", "measure", "scheduler")} | sampled))
    with pytest.raises(UserError, match="`measure` parameters needs `search` grid, but it is random"):
        Plan.read("mine", {}, {})


def test_the_server_of_fedag_is_counted_separately_from_its_clients(monkeypatch, tmp_path):
    """CLIP B/32 has 151,277,313 parameters. FedCLIP's attention adapter has 2 d^2 + 2 d, with d = 512."""
    monkeypatch.setenv("FEDSWEEP_DATA", str(tmp_path / "none"))
    plan = Plan.read("papers/fedag/table1_domainnet", {}, {})
    fedag, fedavg, fedclip = (
        count_parameters(plan.resolve({"arm": name}, 0), 345) for name in ("FedAG", "FedAvg", "FedCLIP")
    )
    adapter, attention = 2 * 512 * 512 + 2 * 512, 345 * 64 + 64 + 64 + 1
    assert fedag.parameters["parameters/server_adapters"] == 3 * adapter + attention
    assert fedag.parameters["parameters/server"] == 151_277_313 + 3 * adapter + attention
    assert fedag.parameters["parameters/all"] == fedavg.parameters["parameters/all"]
    assert fedag.clients == fedavg.clients
    assert "parameters/server" not in fedavg.parameters
    assert fedclip.clients[0].trained == adapter
    assert fedclip.parameters["parameters/backbone"] == 151_277_313
