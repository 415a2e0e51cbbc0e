"""The check without torch raises the error messages of the full check, and accepts every valid configuration."""

import pytest

from fedsweep.cli import early_check
from fedsweep.common.errors import UserError
from fedsweep.common.paths import available
from fedsweep.common.yaml_values import parse_overrides, read_yaml
from fedsweep.federation.run_config import RunConfig
from tests.common.test_config import REFUSALS
from tests.plugin_packages import install

__all__ = ["install"]


def found(overrides: list[str], experiment: RunConfig) -> str | None:
    """Return the error message of the check without torch, or None if it raises nothing."""
    try:
        early_check.check("RunConfig", experiment.model_dump(mode="json"), "here", parse_overrides(overrides))
    except UserError as error:
        return str(error).removeprefix("here: ")
    return None


def test_every_error_message_equals_that_of_the_full_check(experiment):
    early = [(told, one["sentence"]) for one in REFUSALS if (told := found(one["overrides"], experiment)) is not None]
    assert len(early) > len(REFUSALS) / 2
    assert [pair for pair in early if pair[0] != pair[1]] == []


@pytest.mark.parametrize(
    "override",
    [
        "data.domains=[plain, sketchy]",
        "data.domains=[plain, plain]",
        "data.held_out_domains=[foo]",
        "data.held_out_domains=[plain, rotated, inverted, noisy, thick, textured]",
        "lora.alpha=8",
    ],
)
def test_a_rule_of_several_fields_is_checked_without_torch(experiment, override):
    with pytest.raises(UserError) as refusal:
        experiment.override(parse_overrides([override]), "here")
    assert found([override], experiment) == str(refusal.value).removeprefix("here: ")


@pytest.mark.parametrize(("kind", "root"), [("experiments", "RunConfig"), ("pretrain", "PretrainConfig")])
def test_every_shipped_file_is_accepted(kind, root):
    files = available(kind)
    assert files
    for path in files.values():
        early_check.check(root, read_yaml(path), "here", {})


def test_values_and_default_values_equal_those_of_the_full_configuration():
    files = [path for name, path in available("experiments").items() if name.endswith("_digits")]
    assert len(files) == 4
    outline = early_check._outline("RunConfig", ruled=True)
    for path in files:
        full = RunConfig.of(read_yaml(path), "here").model_dump(mode="json")
        assert outline.of(read_yaml(path), "here").model_dump(mode="json") == full


@pytest.mark.parametrize(
    ("overrides", "known"),
    [
        ([], True),
        (["data.held_out_domains=[plain, thick]", "federation.depths=[12, 10, 8, 6]"], True),
        (["method=depthfl"], True),
        (["partition.test_share=0.2"], False),
        (["partition.tuning_share=0.2"], False),
        (["evaluation.metrics=[drift]"], False),
    ],
)
def test_the_metrics_of_a_run_are_known_without_torch(overrides, known):
    path = available("experiments")["fedra_digits"]
    config = RunConfig.of(read_yaml(path), "here").override(parse_overrides(overrides), "here")
    assert early_check.metrics(config) == (config.metrics() if known else None)


def test_the_metrics_of_every_shipped_experiment_on_digits_are_right_or_unknown():
    configs = [
        RunConfig.of(read_yaml(path), name) for name, path in available("experiments").items() if "_digits" in name
    ]
    early = [early_check.metrics(config) for config in configs]
    assert 0 < early.count(None) < len(early)
    assert [one for one, config in zip(early, configs, strict=True) if one not in (None, config.metrics())] == []


def test_nothing_is_raised_if_a_field_was_declared_after_the_schemas_were_written(experiment, monkeypatch):
    assert found(["lora.rnak=4"], experiment) is not None
    monkeypatch.setattr(early_check, "declarations", lambda: "another digest")
    assert found(["lora.rnak=4"], experiment) is None


def test_the_names_of_plugins_are_left_to_the_full_check(experiment, install):
    assert found(["method=odd"], experiment) is not None
    install()
    assert found(["method=odd", "method.strength=0.1"], experiment) is None
