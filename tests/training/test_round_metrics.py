"""Metrics of other installed packages."""

from typing import Any

import pytest
from pydantic import create_model

from fedsweep.common.errors import UserError
from fedsweep.federation.build_and_run import run
from fedsweep.federation.extended import evaluation_config
from fedsweep.federation.run_config import RunConfig
from fedsweep.testing.compare import identical
from fedsweep.training.evaluation import EvaluationConfig
from fedsweep.training.round_metrics import round_metrics, titles_of
from tests.plugin_packages import Install, install

__all__ = ["install"]
STEP = '''
from fedsweep.training.round_metrics import Quantity, RoundMetric


class Step(RoundMetric):
    """The size of the server's step."""

    name = "step"
    quantities = {"step/head": Quantity("Step of the head", "L2 norm"), "step/clients": Quantity("Clients")}

    def measure(self, measured):
        before, after = measured.before.adapter, measured.after.adapter
        (name,) = (name for name in before if name.endswith("head.bias"))
        assert measured.images.shape[1:] == (3, 16, 16)
        assert [one.client.id for one in measured.placed] == [one.client for one in measured.updates]
        norm = (after[name] - before[name]).norm().item()
        measured.model.load_adapter(before)
        return {"step/clients": len(measured.updates), "step/head": norm}
'''
POINT = {"metrics": {"step": "odd_package:Step"}}


@pytest.fixture
def extended(tiny: RunConfig) -> Any:
    """Return a function that reads a small experiment, in which the installed metrics can be selected."""

    def read(**changes: Any) -> RunConfig:
        kind: Any = create_model("RunConfig", __base__=RunConfig, evaluation=(evaluation_config(), ...))
        config: RunConfig = kind.of(tiny.model_dump(mode="json"), "mine").override(changes, "mine")
        return config

    return read


def test_without_plugins_there_are_only_fedsweeps_own_metrics() -> None:
    assert round_metrics() == {}
    assert evaluation_config() is EvaluationConfig


def test_a_metric_of_another_package_is_measured_in_each_evaluated_round(install: Install, extended: Any) -> None:
    install(STEP, POINT)
    both = extended(**{"evaluation.metrics": ["step", "drift"]})
    assert both.metrics()[-4:] == ["drift/representation", "drift/head", "step/head", "step/clients"]
    assert both.plugin_versions()["odd-package"].startswith("0.1 (code ")
    assert titles_of(both.evaluation.metrics) == {"step/head": "Step of the head (L2 norm)", "step/clients": "Clients"}
    plain, measured = (list(run(one)) for one in (extended(), both))
    assert len(measured) == 3
    for without, with_metric in zip(plain, measured, strict=True):
        assert identical(without.state, with_metric.state)
        assert set(without.metrics.items()) < set(with_metric.metrics.items()) or without.round == 0
        assert [name for name in with_metric.metrics if name.startswith("step/")] == ["step/head", "step/clients"] * (
            with_metric.round > 0
        )
        if with_metric.round:
            assert with_metric.metrics["step/clients"] == 3.0
            assert with_metric.metrics["step/head"] > 0


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (
            '"step/clients": len',
            '"step/others": len',
            "must return the values step/clients, step/head, but it returned",
        ),
        ("len(measured.updates)", 'float("nan")', "must return finite numbers, but step/clients is nan"),
    ],
)
def test_a_wrong_result_ends_the_run(install: Install, extended: Any, old: str, new: str, said: str) -> None:
    install(STEP.replace(old, new), POINT)
    with pytest.raises(ValueError, match=f"the metric step {said}"):
        list(run(extended(**{"evaluation.metrics": ["step"]})))


@pytest.mark.parametrize(
    ("old", "new", "rule"),
    [
        ("    quantities = ", "    other = ", "has a mapping `quantities` from the names of its values"),
        ('"step/head": Q', '"size/head": Q', "reports values whose names begin with `step/`, but one is `size/head`"),
        ('name = "step"', 'name = "steps"', 'declares `name = "step"`, but the name of `odd_package:Step` is steps;'),
    ],
)
def test_a_broken_metric_is_reported(install: Install, old: str, new: str, rule: str) -> None:
    install(STEP.replace(old, new), POINT)
    with pytest.raises(UserError) as caught:
        round_metrics()
    assert rule in str(caught.value)


def test_a_metric_cannot_have_the_name_of_fedsweeps_metrics(install: Install) -> None:
    install(STEP.replace("step", "accuracy"), {"metrics": {"accuracy": "odd_package:Step"}})
    with pytest.raises(UserError, match=r"`accuracy` in group fedsweep.metrics .* must not have a name of fedsweep"):
        round_metrics()


def test_every_metric_of_a_run_begins_with_a_taken_name(tiny: RunConfig) -> None:
    from fedsweep.training.round_metrics import TAKEN

    every = tiny.override({"evaluation.metrics": ["drift", "structural_bias"], "evaluation.last_rounds": 2}, "mine")
    names = {name.split("/")[0] for name in every.metrics()}
    assert len(names) > 7
    assert names <= set(TAKEN)


def test_an_unknown_metric_is_reported_with_all_choices(install: Install, extended: Any) -> None:
    install(STEP, POINT)
    with pytest.raises(UserError, match=r"`evaluation.metrics.0` must be 'drift', 'structural_bias' or 'step', but"):
        extended(**{"evaluation.metrics": ["steps"]})
