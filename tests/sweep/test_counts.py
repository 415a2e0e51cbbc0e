"""Counts without training: FedBRICK's Table 3, and clients as rounds count them."""

import json
import re
from pathlib import Path

import pytest

from fedsweep.errors import UserError
from fedsweep.federation import federate
from fedsweep.plain import read_yaml
from fedsweep.sweep.counts import COUNTS, count_parameters
from fedsweep.sweep.plan import Plan
from tests.sweep.helpers import fedsweep

ROOT = Path(__file__).parents[2]
GOLDEN = json.loads((ROOT / "tests" / "golden" / "counts.json").read_text())
SPACE = "papers/fedbrick/table3"


@pytest.fixture
def plan(monkeypatch, tmp_path) -> Plan:
    monkeypatch.setenv("FEDSWEEP_DATA", str(tmp_path / "none"))  # neither images nor weights
    return Plan.read(SPACE, {}, {})


@pytest.mark.parametrize("place", [0, 1], ids=["vit", "mixer"])
def test_table_3_is_counted_exactly(plan, place):
    expected = GOLDEN[("vit_b16", "mixer_b16")[place]]
    arm = plan.space.arms()[place]
    counted = count_parameters(plan.resolve(arm, 0), 100)
    assert counted.parameters == {
        "parameters/all": expected["all_with_lora_r8_both_and_100_classes"],
        "parameters/block": expected["block"],
        "parameters/lora_per_block": expected["lora_r8_both_per_block"],
        "parameters/head": expected["head_100_classes"],
        "parameters/brick": 24_576,
    }
    for name in COUNTS:  # the paper prints three digits, cut off or rounded
        assert counted.parameters[name] == pytest.approx(plan.reference.value(arm, name), rel=0.01)


def test_the_upload_of_the_smallest_client_is_the_papers(plan):
    counted = count_parameters(plan.resolve(plan.space.arms()[0], 0), 100)
    assert [one.depth for one in counted.clients] == [12, 10, 8, 6, 5, 4]
    assert counted.clients[-1].bytes_up == 1_087_688  # "1.08MB (bf16)"
    assert {one.bricks for one in counted.clients} == {12 * 24_576}
    shares = [one.bricks / (one.held - one.bricks) for one in counted.clients]
    assert (f"{shares[0]:.1%}", f"{shares[-1]:.1%}") == ("0.3%", "1.0%")


METHODS = [
    *({"name": name} for name in ("fedra", "all_large", "all_small", "depthfl", "inclusivefl", "fedbrick")),
    {"name": "fedra", "missing_layers": "ensure_cover"},
    {"name": "fedbrick", "parallel": False},
    {"name": "fedbrick", "compensate": False},
    {"name": "fedbrick", "over": {"name": "depthfl"}},
]


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_counted_clients_are_what_a_round_counts(federation, tiny, method):
    changes = {"method": method, "partition.proxy_share": 0.2, "federation.depths": [9, 6, 3], "federation.rounds": 1}
    _, result = federate(federation(changes))
    clients = count_parameters(tiny.override(changes, "test"), 10).clients
    assert [one.depth for one in clients] == {"all_small": [3], "all_large": [12]}.get(method["name"], [9, 6, 3])
    times = 3 // len(clients)
    assert sum(one.held for one in clients) / len(clients) == result.metrics["parameters/held"]
    assert times * sum(one.bytes_up for one in clients) == result.metrics["bytes/up"] / 2  # which is in float32


def test_dynamic_depths_are_counted_each_and_a_frozen_a_is_no_part_of_a_block(tiny):
    dynamic = {"federation.depths": "dynamic", "partition.proxy_share": 0.2, "method": "fedbrick"}
    plain, frozen = (
        count_parameters(tiny.override({**dynamic, "aggregation.lora": rule}, "test"), 10)
        for rule in ("factors", "freeze_a")
    )
    assert [one.depth for one in plain.clients] == list(range(12, 0, -1))
    assert frozen.parameters == plain.parameters
    assert frozen.clients[0].bytes_up < plain.clients[0].bytes_up


def test_the_command_prints_the_counts_and_records_nothing(tmp_path):
    shown = fedsweep(tmp_path, "tune", SPACE).stdout
    numbers = set(re.findall(r"[\d,.]+[MK]?", shown))
    assert {"86,391,652", "59,612,692", "24,576", "1,087,688", "86.4M", "24.5K"} <= numbers
    assert not (tmp_path / "mlruns").exists()
    assert fedsweep(tmp_path, "show", SPACE).stdout == shown


def test_counts_are_of_a_grids_arms_and_a_paper_can_give_only_what_is_counted(tmp_path, monkeypatch):
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
    with pytest.raises(UserError, match="`measure` parameters counts the arms of a grid, and `search` random has none"):
        Plan.read("mine", {}, {})
