"""Named arms, with their changes to the experiment and their labels."""

from pathlib import Path
from typing import Any

import pytest

from fedsweep.common.config import flat
from fedsweep.common.errors import UserError
from fedsweep.results.arms import arm_label
from fedsweep.sweep.plan.plan import Plan
from fedsweep.tracking.trial_description import run_name
from tests.places import without_place
from tests.sweep.helpers import write_space

FILE: dict[str, Any] = {
    "experiment": "fedra_digits",
    "named": {
        "FedRA": {},
        "FedAvg, tuned": {"method": "ft", "optimizer.lr": 0.01},
        "FedProx": {"method": "ft", "base_optimizer": {"name": "fedprox", "mu": 0.5}},
    },
    "baseline": {"arm": "FedRA"},
    "search": {"name": "grid"},
    "scheduler": {"name": "none"},
}


@pytest.fixture
def read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)

    def make(changes: dict[str, Any] | None = None, **entries: Any) -> Plan:
        write_space(tmp_path, "mine", FILE | entries)
        return Plan.read("mine", changes or {}, {})

    return make


def differing(one: Any, other: Any) -> set[str]:
    left, right = flat(one), flat(other)
    return {name for name in left | right if left.get(name) != right.get(name)}


def test_a_named_arm_makes_exactly_its_changes(read):
    plan = read()
    arms = plan.arms
    assert arms == [{"arm": "FedRA"}, {"arm": "FedAvg, tuned"}, {"arm": "FedProx"}]
    fedra, fedavg, fedprox = (plan.resolve(arm, 0) for arm in arms)
    assert fedra == plan.base
    assert (fedavg.method.name, fedavg.optimizer.lr, fedavg.base_optimizer.name) == ("ft", 0.01, "fedavg")
    assert differing(fedavg, fedprox) == {"optimizer.lr", "base_optimizer.name", "base_optimizer.mu"}
    assert fedprox.base_optimizer.mu == 0.5


def test_labels_and_mlflow_show_the_names_of_arms(read):
    plan = read(space={"lora.rank": {"grid": [4, 8]}})
    arms = plan.arms
    assert len(arms) == 6
    assert arm_label(arms[4]) == "lora.rank=8, FedAvg, tuned"
    assert run_name(plan.trial(0, arms[4], 2)) == "rank 8 · FedAvg, tuned · seed 2"
    assert plan.space.names == ["lora.rank", "method", "optimizer.lr", "base_optimizer"]


def test_a_baseline_and_a_reference_may_use_the_name_of_an_arm(read):
    values = {"accuracy/mean": 50.0}
    paper = {"source": "Table 1", "arms": [{"arm": {"arm": "FedProx"}, "values": values}]}
    assert read(reference=paper).reference.value({"arm": "FedProx"}, "accuracy/mean") == 0.5
    assert read(space={"lora.rank": {"grid": [4, 8]}}).space.baseline == {"arm": "FedRA"}


@pytest.mark.parametrize(
    ("entries", "sentence"),
    [
        ({"baseline": {"arm": "FedMS"}}, "`baseline` must be one of the arms, but {'arm': 'FedMS'} is not; write "
         '`baseline: {arm: FedRA}` or `baseline: {arm: "FedAvg, tuned"}` or `baseline: {arm: FedProx}`.'),
        ({"space": {"method": {"grid": ["fedra"]}}}, "`method` is changed by the arm `FedAvg, tuned` of `named` and "
         "cannot also vary in `space` or `ablate`."),
        ({"ablate": {"optimizer.lr": 0.5}}, "`optimizer.lr` is changed by the arm `FedAvg, tuned` of `named` and "
         "cannot also vary in `space` or `ablate`."),
        ({"fixed": {"optimizer.lr": 0.5}}, "`optimizer.lr` is varied by the search space and cannot also be in "
         "`fixed`."),
        ({"named": {"Fed\aAvg": {}}}, "`named` must not contain control characters, but it contains U+0007 in "
         '"Fed\\u0007Avg".'),
        ({"named": {}}, "`named` must have at least 1 item, but it is {}."),
        ({"named": {"a": {}, "b": {}}, "baseline": {"arm": "a"}}, "the arms a and b are the same run."),
        ({"named": {"b": {}, "a": {"lora.rnak": 4}}, "baseline": {"arm": "a"}}, "`lora.rnak` is not a "
         "hyperparameter of this run; did you mean `lora.rank` or `lora.alpha` or `lora.rank_scaling`?"),
        ({"search": {"name": "random"}, "seeds": [0], "baseline": None}, "`named` needs `search` grid, but it is "
         "random."),
    ],
)  # fmt: skip
def test_invalid_named_arms_are_rejected_in_one_sentence(read, entries, sentence):
    with pytest.raises(UserError) as refusal:
        read(**entries)
    assert without_place(str(refusal.value)).removeprefix("arm a: ") == sentence
