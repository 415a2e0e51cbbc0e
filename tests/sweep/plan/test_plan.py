"""Plans of search spaces, with the trials, their keys, and the checks of references and metrics."""

from collections import Counter
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from fedsweep.common.config import flat
from fedsweep.common.errors import UserError
from fedsweep.data.data_config import load
from fedsweep.federation.build_and_run import content_digests
from fedsweep.federation.run_config import RunConfig
from fedsweep.results import Store
from fedsweep.results.arms import counterparts, identity
from fedsweep.sweep.cluster.node_requirements import Needs
from fedsweep.sweep.plan import plan as plan_module
from fedsweep.sweep.plan.plan import Plan, engine_digest
from fedsweep.sweep.running.open_sweep import new_sweep
from fedsweep.sweep.space.settings import Objective
from fedsweep.tracking.sweep_description import git_commit
from tests.places import without_place
from tests.sweep.helpers import GRID, SAMPLED, write_space

ROOT = Path(__file__).parents[3]


@pytest.fixture
def read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)

    def make(space: dict[str, Any] = GRID, changes: dict[str, Any] | None = None, **space_changes: Any) -> Plan:
        write_space(tmp_path, "tiny", space)
        return Plan.read("tiny", changes or {}, space_changes)

    return make


def test_a_grid_has_every_arm_with_every_seed_ordered_by_seed(read: Any) -> None:
    trials = read().grid()
    assert [(trial.seed, trial.arm["lora.rank"]) for trial in trials] == [(0, 1), (0, 4), (1, 1), (1, 4)]
    assert [trial.number for trial in trials] == [0, 1, 2, 3]
    assert len({trial.key for trial in trials}) == 4


def test_a_pruned_grid_is_shuffled_reproducibly_within_each_seed(read: Any) -> None:
    wide = {**GRID, "space": {"lora.rank": {"grid": list(range(1, 13))}}, "scheduler": {"name": "asha"}}
    orders = [[trial.arm["lora.rank"] for trial in read(wide).grid()] for _ in range(2)]
    assert orders[0] == orders[1]
    for start in (0, 12):
        part = orders[0][start : start + 12]
        assert sorted(part) == list(range(1, 13)) != part


def test_trials_of_two_arms_differ_only_in_the_varied_hyperparameters(read: Any) -> None:
    plan = read()
    one, four, *_ = plan.grid()
    configs = [flat(plan.resolve(trial.arm, trial.seed)) for trial in (one, four)]
    assert {name for name in configs[0] if configs[0][name] != configs[1][name]} == {"lora.rank"}


def test_a_trials_key_depends_on_its_content_only(read: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [trial.key for trial in read().grid()]
    assert keys == [trial.key for trial in read().grid()]
    assert not set(keys) & {trial.key for trial in read(changes={"local.steps": 2}).grid()}
    assert keys[:2] == [trial.key for trial in read(seeds=[0]).grid()], "a key must not depend on the other seeds"
    monkeypatch.setattr(plan_module, "engine_digest", lambda: "another engine")
    assert not set(keys) & {trial.key for trial in read().grid()}


def test_equal_samples_have_different_keys(read: Any) -> None:
    plan = read(SAMPLED)
    arm = {"optimizer.lr": 0.1, "lora.position": "l0"}
    assert plan.trial(0, arm, 0).key != plan.trial(1, arm, 0).key


def test_the_engine_digest_covers_methods_and_weights_but_not_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shutil

    import fedsweep

    copy = tmp_path / "fedsweep"
    shutil.copytree(Path(fedsweep.__file__).parent, copy)
    monkeypatch.setattr(fedsweep, "__file__", str(copy / "__init__.py"))
    before = engine_digest()
    (copy / "report" / "table.py").write_text("changed")
    (copy / "methods" / ".#fedra.py").symlink_to(tmp_path / "missing")  # Emacs creates such links
    (copy / "methods" / "gone.py").symlink_to(tmp_path / "missing")
    (copy / "methods" / ".hidden.py").write_text("")
    assert engine_digest() == before
    for name in ("methods/fedra.py", "training/local_training.py", "models/weights/digits_vit.safetensors"):
        with (copy / name).open("ab") as file:
            file.write(b"\n")
        after = engine_digest()
        assert after != before
        before = after


@pytest.mark.parametrize(
    "axis", [{"optimizer.lr": {"grid": [1, 1.0]}}, {"method": {"grid": ["fedra", {"name": "fedra"}]}}]
)
def test_two_arms_that_are_the_same_run_are_rejected(read: Any, axis: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="are the same run"):
        read({**GRID, "space": axis, "baseline": None})


def test_a_baseline_must_equal_an_arm(read: Any) -> None:
    """Outputs print 1.0 as 1, so both are the same value."""
    space = {"optimizer.lr": {"grid": [0.1, 1.0]}}
    with pytest.raises(UserError, match="`baseline` must be one of the arms"):
        read({**GRID, "space": space, "baseline": {"optimizer.lr": 0.2}})
    plan = read({**GRID, "space": space, "baseline": {"optimizer.lr": 1}})
    wanted = {"optimizer.lr": 1.0}
    assert counterparts(plan.arms, plan.space.baseline) == {identity(arm): wanted for arm in plan.arms}


def test_the_t_sne_of_every_arm_is_checked_before_the_sweep(read: Any) -> None:
    axis = {"evaluation.tsne_classes": {"grid": [None, 10, 11]}}
    with pytest.raises(UserError, match="at most 10, the number of classes of the data, but it is 11"):
        read({**GRID, "space": axis, "baseline": None}).preflight()


def with_paper(**values: float) -> dict[str, Any]:
    named = {name.replace("__", "/"): value for name, value in values.items()}
    return {**GRID, "reference": {"source": "Table 1", "arms": [{"arm": {"lora.rank": 4}, "values": named}]}}


def test_a_reference_changes_neither_the_definition_nor_the_trials(read: Any) -> None:
    plain, paper, corrected = (
        read(space) for space in (GRID, with_paper(accuracy__mean=77.1), with_paper(accuracy__mean=77.2))
    )
    assert len({plan.digests()["definition"] for plan in (plain, paper, corrected)}) == 1
    assert (
        [one.key for one in plain.grid()] == [one.key for one in paper.grid()] == [one.key for one in corrected.grid()]
    )


def test_metrics_are_not_computed_without_domains_in_the_reference(read: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plans = [read(GRID), read(with_paper(accuracy__mean=77.1))]
    monkeypatch.setattr(RunConfig, "metrics", None)
    assert [plan.reference for plan in plans] == [plan.space.reference for plan in plans]


@pytest.mark.parametrize(
    ("changes", "options", "refused"),
    [
        ({}, {}, True),
        ({"local.steps": 2}, {"seeds": [0]}, True),
        ({"data.domains": ["noisy", "rotated"]}, {}, False),
        ({}, {"experiment": "fedra_digits"}, False),
    ],
)
def test_a_references_domains_may_be_missing_from_other_data(
    read: Any, changes: dict[str, Any], options: dict[str, Any], refused: bool
) -> None:
    space = with_paper(accuracy__mean=77.1, accuracy__domain__clipart=85)
    if refused:
        with pytest.raises(
            UserError, match=r"tiny\.yaml:\d+:\d+: `reference` accuracy/domain/clipart is not reported by"
        ):
            read(space, changes, **options)
    else:
        kept = read(space, changes, **options).space.reference.metrics()
        assert sorted(kept) == ["accuracy/domain/clipart", "accuracy/mean"]
    with pytest.raises(UserError, match="`reference` accuracy/men is not reported by this run; did you mean"):
        read(with_paper(accuracy__men=77.1), changes, **options)


@pytest.mark.parametrize("metric", ["accuracy/last_rounds", "loss/last_rounds", "validation/loss/last_rounds"])
def test_a_mean_over_the_last_rounds_needs_a_number_of_rounds(read: Any, metric: str) -> None:
    space, images = GRID | {"objective": {"metric": metric}}, {"data.validation_fraction": 0.2}
    with pytest.raises(UserError, match=rf"`objective.metric` {metric} needs a number of rounds in `eval"):
        read(space, images)
    goal = read(space, {"evaluation.last_rounds": 2, **images}).space.goal
    assert (goal.metric, goal.mode) == (metric, "min" if "loss" in metric else "max")


@pytest.mark.parametrize("metric", ["loss/test", "loss/train", "loss/last_rounds", "validation/loss"])
def test_losses_are_minimised(metric: str) -> None:
    assert Objective.of({"metric": metric}, "test").mode == "min"
    with pytest.raises(UserError, match=f"`objective.mode` must be min for `objective.metric` {metric}, a loss"):
        Objective.of({"metric": metric, "mode": "max"}, "test")


@pytest.mark.parametrize("given", [{}, {"metric": None}, {"metric": "accuracy/mean"}, {"metric": "bytes/up"}])
def test_other_metrics_are_maximised_unless_the_objective_has_a_mode(given: dict[str, Any]) -> None:
    assert Objective.of(given, "test").mode == "max"
    assert Objective.of({**given, "mode": "min"}, "test").mode == "min"


LEFT_OUT = {"data.held_out_domains": {"grid": [["plain"], ["noisy"]]}}


def leave_out(*values: dict[str, float]) -> dict[str, Any]:
    """Return a grid whose arms hold out one domain each, with the values of a paper for the first arms."""
    arms = [{"data.held_out_domains": held_out} for held_out in LEFT_OUT["data.held_out_domains"]["grid"]]
    printed = [{"arm": arm, "values": value} for arm, value in zip(arms, values, strict=False)]
    return {
        **GRID,
        "fixed": {**GRID["fixed"], "data.domains": ["plain", "inverted", "noisy"], "federation.depths": [4]},
        "space": LEFT_OUT,
        "baseline": None,
        "reference": {"source": "Table 1", "arms": printed},
    }


def test_a_domain_may_be_held_out_in_some_arms_only(read: Any, tmp_path: Path) -> None:
    values = {"accuracy/out_of_domain/plain": 60, "accuracy/out_of_domain_mean": 60, "accuracy/domain/noisy": 70}
    plan = read(leave_out(values, {"accuracy/out_of_domain/noisy": 50, "accuracy/domain/plain": 80}))
    manifest = new_sweep(plan, Store(tmp_path / "mlruns")).manifest()
    assert manifest.domains == ("plain", "inverted", "noisy")
    assert manifest.reference == plan.space.reference


def test_the_manifest_contains_the_domains_of_all_arms(read: Any, tmp_path: Path) -> None:
    domains = {"data.domains": {"grid": [["plain", "noisy"], ["plain", "thick"]]}}
    content = yaml.safe_load((ROOT / "experiments" / "fedra_digits.yaml").read_text())
    content["data"]["domains"], content["federation"]["depths"] = ["plain", "rotated"], [12]
    (tmp_path / "experiments").mkdir()
    (tmp_path / "experiments" / "two.yaml").write_text(yaml.safe_dump(content))
    space = {**GRID, "experiment": "two", "fixed": {"local.steps": 1}, "space": domains, "baseline": None}
    plan = read(space)
    manifest = new_sweep(plan, Store(tmp_path / "mlruns")).manifest()
    assert manifest.domains == ("plain", "rotated", "noisy", "thick")


def test_a_reference_value_needs_a_metric_that_its_arm_reports(read: Any) -> None:
    space = leave_out({"accuracy/out_of_domain/plain": 60}, {"accuracy/out_of_domain/plain": 50})
    which = r"is not reported by the arm data.held_out_domains=\[noisy\]"
    with pytest.raises(UserError, match=rf"tiny\.yaml:\d+:\d+: `reference` accuracy/out_of_domain/plain {which}\.$"):
        read(space)


@pytest.mark.parametrize("metric", ["accuracy/out_of_domain/noisy", "accuracy/out_of_domain_mean"])
def test_a_references_held_out_domains_may_be_missing_from_other_data(read: Any, metric: str) -> None:
    space = {**with_paper(accuracy__mean=77.1), "fixed": {**GRID["fixed"], "data.held_out_domains": ["noisy"]}}
    space["fixed"] |= {"data.domains": ["plain", "inverted", "noisy"], "federation.depths": [4]}
    space["reference"]["arms"][0]["values"][metric] = 50
    assert read(space).reference == read(space).space.reference is not None
    other = read(space, {"data.held_out_domains": []})
    assert other.space.reference is not None
    assert other.reference is None
    del space["fixed"]["data.held_out_domains"]
    with pytest.raises(UserError, match=f"`reference` {metric} is not reported by this run"):
        read(space)


def test_trials_are_tagged_with_the_source_of_their_synthetic_images(read: Any) -> None:
    given = {"synthetic": "surrogate", "partition.proxy_share": 0.1}
    methods = {"method": {"grid": ["fedra", {"name": "ft", "synthetic_epochs": 1}]}}
    space = {**GRID, "fixed": {**GRID["fixed"], **given}, "space": methods, "baseline": None}
    marks = [(trial.config["method"]["name"], trial.marks) for trial in read(space).grid()[:2]]
    assert marks == [("fedra", {}), ("ft", {"synthetic": "surrogate"})]


def test_the_manifest_contains_the_reference(read: Any, tmp_path: Path) -> None:
    plan = read(with_paper(accuracy__mean=77.1))
    sweep = new_sweep(plan, Store(tmp_path / "mlruns"))
    assert sweep.manifest().reference == plan.space.reference
    assert sweep.manifest().reference.value({"lora.rank": 4}, "accuracy/mean") == 0.771


def test_the_manifest_and_the_plans_contain_the_code_and_the_numbers_of_images(read: Any, tmp_path: Path) -> None:
    held_out = {"data.held_out_domains": {"grid": [[], ["rotated"]]}}
    plan = read({**GRID, "space": held_out, "baseline": None}, {"federation.depths": [12]})
    manifest = new_sweep(plan, Store(tmp_path / "store")).manifest()
    assert (manifest.version, manifest.commit) == (metadata.version("fedsweep"), git_commit())
    trials = [trial for trial in plan.grid() if trial.seed == 0]
    both, plain = (trial.images for trial in trials)
    assert both["train"] + both["test"] == 2 * 1797, "the scans of load_digits, in two styles"
    assert both["in_domain_test"] == both["test"]
    expected = {"train": both["train"] // 2, "test": both["test"], "in_domain_test": both["test"] // 2}
    assert plain == expected, "a held-out domain is only tested, and does not count toward accuracy/mean"
    labels = [Counter(domain.test.labels.tolist()) for domain in load(plan.base.data).domains]
    constant = [np.mean([found[digit] / found.total() for found in labels]) for digit in range(10)]
    assert [trial.chance for trial in trials] == [pytest.approx(max(constant))] * 2


def test_the_definition_does_not_depend_on_the_order_of_overrides(read: Any) -> None:
    changes = {"local.steps": 2, "optimizer.lr": 0.5}
    backwards = dict(reversed(changes.items()))
    assert read(changes=changes).digests() == read(changes=backwards).digests() != read().digests()


def test_unused_synthetic_images_cannot_vary():
    with pytest.raises(UserError) as refusal:
        Plan.read("ablations/synthetic_share", {"method": "ft"}, {})
    assert without_place(str(refusal.value)) == (
        "`synthetic` varies, but the arm synthetic.share=0.02 does not train on synthetic images."
    )
    assert (
        Plan.read("ablations/synthetic_share", {"method": {"name": "ft", "synthetic_epochs": 1}}, {}).num_trials == 12
    )


def test_each_configuration_is_validated_once_and_each_content_digested_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The 13 validations are of the experiment, the base and 11 of 12 trials; one trial equals the base."""
    calls: Counter[str] = Counter()
    validate, digest = RunConfig.of.__func__, content_digests  # type: ignore[attr-defined]

    def validated(cls: type[RunConfig], *given: Any, **named: Any) -> RunConfig:
        calls["validations"] += 1
        return validate(cls, *given, **named)  # type: ignore[no-any-return]

    def digested(config: RunConfig) -> dict[str, str]:
        calls["digests"] += 1
        return digest(config)

    monkeypatch.setattr(RunConfig, "of", classmethod(validated))
    monkeypatch.setattr(plan_module, "content_digests", digested)
    plan = Plan.read("ablations/lora_rank", {}, {})
    plan.preflight()
    assert len({trial.key for trial in plan.grid()}) == 4 * 8
    plan.digests()
    Needs.of(plan)
    assert calls == {"validations": 4 * 8 + 1, "digests": 1}
