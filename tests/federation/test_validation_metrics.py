"""Metrics of validation images, which are measured like those of test images."""

from dataclasses import replace

import pytest

from fedsweep.cli import early_check
from fedsweep.common.errors import UserError
from fedsweep.federation.build_and_run import run_resumably
from fedsweep.federation.rounds import federate
from fedsweep.results.history import TESTED, on_test, on_validation
from fedsweep.testing.compare import identical

VALIDATED = {"federation.rounds": 3, "data.validation_fraction": 0.3}
LAST = {**VALIDATED, "evaluation.test_rounds": "last"}


def test_validation_metrics_are_the_test_metrics_of_the_validation_images(federation):
    ours = federation(VALIDATED)
    swapped = replace(
        federation(VALIDATED),
        domains=[replace(one, test=one.validation, validation=one.test) for one in ours.domains],
    )
    for one, other in zip(federate(ours), federate(swapped), strict=True):
        validated = {name: value for name, value in one.metrics.items() if name.startswith("validation/")}
        expected = {name: other.metrics[on_test(name)] for name in validated}
        assert validated == pytest.approx(expected, rel=1e-6)
        assert validated.keys() == {on_validation(name) for name in one.metrics} - {None}
        assert len(validated) == 4 + len(ours.domains)
        assert TESTED in one.metrics


def test_test_images_are_measured_only_in_round_0_and_the_last_round(federation):
    everywhere, ends = list(federate(federation(VALIDATED))), list(federate(federation(LAST)))
    for one, other in zip(everywhere, ends, strict=True):
        assert identical(one.state, other.state)
        missing = {name for name in one.metrics if name.startswith(("accuracy/", "loss/test", TESTED))}
        assert set(one.metrics) - set(other.metrics) == (missing if one.round in (1, 2) else set())
        assert other.metrics == pytest.approx({name: one.metrics[name] for name in other.metrics}, rel=1e-6)
        assert "validation/accuracy/mean" in other.metrics


def test_rounds_between_the_first_and_the_last_are_validated_on_some_images(federation):
    small = federation({**VALIDATED, "evaluation.images_per_domain": 4})
    domains, _ = small.tested(1)
    assert [len(one.validation) for one in domains] == [4] * len(domains)
    assert [one.validation for one in small.tested(3)[0]] == [one.validation for one in small.domains]


@pytest.mark.parametrize("more", [{}, {"evaluation.last_rounds": 2}])
def test_the_names_of_the_metrics_are_known_before_a_run(tiny, tmp_path, more):
    config = tiny.override(VALIDATED | more, "test")
    *_, last = run_resumably(config, tmp_path / "checkpoint")
    assert set(config.metrics()) == set(last.metrics)
    assert early_check.metrics(config) == config.metrics()


def test_rounds_without_test_images_need_validation_images(tiny):
    with pytest.raises(UserError, match=r"`evaluation.test_rounds` last .* needs a `data.validation_fraction` above 0"):
        tiny.override({"evaluation.test_rounds": "last"}, "test")


def test_a_mean_over_rounds_needs_test_images_in_all_rounds(tiny):
    with pytest.raises(UserError, match=r"`evaluation.last_rounds` 3 .* needs `evaluation.test_rounds` all"):
        tiny.override({**LAST, "evaluation.last_rounds": 3}, "test")


def test_a_mean_over_rounds_needs_more_than_one_evaluated_round(tiny):
    assert tiny.override({"evaluation.last_rounds": 3, "federation.evaluate_every": 2}, "test")
    with pytest.raises(UserError, match=r"`evaluation.last_rounds` must be larger than .* 3, .* but it is 3"):
        tiny.override({"evaluation.last_rounds": 3, "federation.evaluate_every": 3}, "test")


SHARES = {"federation.rounds": 3, "partition.test_share": 0.1, "partition.tuning_share": 0.2}


def test_validation_metrics_of_clients_are_the_test_metrics_of_their_tuning_images(federation):
    ours = federation(SHARES)
    swapped = federation(SHARES)
    swapped = replace(swapped, clients=[replace(one, test=one.tuning, tuning=one.test) for one in swapped.clients])
    for one, other in zip(federate(ours), federate(swapped), strict=True):
        found = {name: value for name, value in one.metrics.items() if name.startswith("validation/")}
        assert found == {name: other.metrics[on_test(name)] for name in found}
        assert {on_test(name) for name in found} == {name for name in one.metrics if name.startswith("accuracy/client")}
        assert len(found) == 3 + len(ours.clients)
    assert {len(one.tuning) for one in ours.clients} != {len(one.test) for one in ours.clients}


@pytest.mark.parametrize("more", [{}, {"data.validation_fraction": 0.3}])
def test_tuning_images_are_measured_in_all_rounds(federation, tiny, more):
    ends = federation({**SHARES, **more, "evaluation.test_rounds": "last"})
    for one in federate(ends):
        inside = one.round in (1, 2)
        assert ("accuracy/clients/mean" in one.metrics) != inside
        assert ("accuracy/mean" in one.metrics) != inside
        assert "validation/accuracy/clients/mean" in one.metrics
        assert ("validation/accuracy/mean" in one.metrics) == bool(more)
    assert set(tiny.override({**SHARES, **more}, "test").metrics()) == set(one.metrics)
