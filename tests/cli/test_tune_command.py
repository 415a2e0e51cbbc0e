"""The command in a report, which sets the same changes again when it is typed in a shell."""

import shlex
from typing import Any

import pytest
import typer

from fedsweep import cli
from fedsweep.cli.tune import space_changes
from fedsweep.common.yaml_values import parse_overrides
from fedsweep.results.tune_command import SPACE_OPTIONS, tune_command
from tests.report.conftest import make_manifest

TUNE: Any = typer.main.get_command(cli.app).commands["tune"]  # type: ignore[attr-defined]
OVERRIDES: dict[str, Any] = {
    "federation.rounds": 5,
    "optimizer.lr": 1e-05,
    "optimizer.weight_decay": 0.0,
    "federation.depths": [12, 6],
    "lora.patch_embed": True,
    "lora.alpha": None,
    "method": {"name": "fedra", "missing_layers": "keep_previous"},
    "backbone.pretrained": "my weights/it's #1: a,b.safetensors",
    "backbone.prompt": 'a "picture" of {} \\ `x` $HOME\n\ttwo lines\u2028three',
    "data.set": "8",
    "data.other": "null",
}
OPTIONS: dict[str, Any] = {
    "experiment": "fedra_digits",
    "seeds": [0, 1],
    "subsets": "all",
    "design": "one_factor",
    "exclude": [{"lora.rank": 1, "lora.position": "l0"}, {"arm": "a, b"}],
    "scheduler": "arms",
    "columns": ["worst_domain", "rounds_to=0.7"],
    "search.samples": 8,
    "search.warm_start": "mine/space@20260101-120000-ab12",
    "resources.cpus_per_trial": 0.5,
    "resources.gpus_per_trial": "auto",
    "resources.system_metrics": True,
}


def typed(command: str) -> Any:
    """Return the parameters of `fedsweep tune` after it is typed in a shell."""
    program, verb, *words = shlex.split(command)
    assert (program, verb) == ("fedsweep", "tune")
    return TUNE.make_context("tune", words).params


@pytest.mark.parametrize("fresh", [False, True])
def test_the_command_sets_every_change_of_the_sweep(fresh):
    assert {*OPTIONS} == {*SPACE_OPTIONS.values()}
    command = tune_command(make_manifest(overrides=OVERRIDES, options=OPTIONS, fresh=fresh))
    assert command is not None
    assert "\n" not in command
    given = typed(command)
    assert (given["space"], given["fresh"]) == ("ablations/lora_rank", fresh)
    assert parse_overrides(given["overrides"]) == OVERRIDES
    assert space_changes(given) == OPTIONS


def test_a_sweep_without_changes_has_a_short_command():
    assert tune_command(make_manifest()) == "fedsweep tune ablations/lora_rank"
    changed = make_manifest(
        overrides={"federation.rounds": 5}, options={"seeds": [0, 1], "resources.gpus_per_trial": 0.5}
    )
    assert (
        tune_command(changed)
        == "fedsweep tune ablations/lora_rank federation.rounds=5 --seeds 0,1 --gpus-per-trial 0.5"
    )


@pytest.mark.parametrize("rule", [{}, {"smallest_effect": 2.0}, {"first": 20}, {"smallest_effect": 1.5, "first": 8}])
def test_the_command_sets_the_rule_of_seeds_until_decided(rule):
    options = {"seeds": {"until": "decided", **rule}}
    command = tune_command(make_manifest(options=options))
    assert command is not None
    assert space_changes(typed(command)) == options
    assert tune_command(make_manifest(options={"seeds": {**options["seeds"], "at_most": 9}})) is None


@pytest.mark.parametrize(
    "options",
    [{"objective.metric": "loss/test"}, {"scheduler": {"name": "asha"}}, {"resources.system_metrics": False}],
)
def test_a_change_without_an_option_has_no_command(options):
    assert tune_command(make_manifest(options=options)) is None
