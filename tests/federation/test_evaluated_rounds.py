"""Rounds that are not evaluated, rounds that are evaluated on some images, and the shared first evaluation."""

from collections import Counter
from dataclasses import replace

import pytest
import torch

from fedsweep.federation.build_and_run import run_resumably
from fedsweep.federation.rounds import federate
from fedsweep.models.activation_cache import FrozenRows
from fedsweep.results.history import TESTED
from fedsweep.testing.compare import identical
from fedsweep.training.evaluation import stratified

ROUNDS = {"federation.rounds": 5}


def test_only_the_last_round_and_multiples_are_evaluated(federation):
    plain = list(federate(federation(ROUNDS)))
    sparse = list(federate(federation({**ROUNDS, "federation.evaluate_every": 2})))
    assert [result.round for result in sparse if "accuracy/mean" in result.metrics] == [0, 2, 4, 5]
    for ours, theirs in zip(sparse, plain, strict=True):
        assert identical(ours.state, theirs.state)
        assert {name: theirs.metrics[name] for name in ours.metrics} == dict(ours.metrics)
        left_out = set(theirs.metrics) - set(ours.metrics)
        assert left_out == (set() if ours.round in (0, 2, 4, 5) else {name for name in left_out if "lora" not in name})
        assert ("loss/test" in ours.metrics) == (TESTED in ours.metrics) == (ours.round in (0, 2, 4, 5))


def test_rounds_at_which_a_scheduler_compares_are_evaluated(tiny, tmp_path):
    config = tiny.override({**ROUNDS, "federation.evaluate_every": 5}, "test")

    def evaluated(**rest):
        name = "-".join(map(str, rest.values()))
        records = run_resumably(config, tmp_path / f"{name}.ckpt", **rest)
        return [one.round for one in records if "accuracy/mean" in one.metrics]

    assert evaluated() == [0, 5]
    assert evaluated(compared=[1, 3]) == [0, 1, 3, 5]
    assert evaluated(until=2) == [0]


def test_the_mean_over_the_last_rounds_is_independent_of_schedulers_and_of_interruptions(tiny, tmp_path):
    config = tiny.override({**ROUNDS, "federation.evaluate_every": 2, "evaluation.last_rounds": 3}, "test")
    plain = list(run_resumably(config, tmp_path / "plain"))
    compared = list(run_resumably(config, tmp_path / "compared", compared=[3]))
    list(run_resumably(config, tmp_path / "resumed", until=4))
    resumed = list(run_resumably(config, tmp_path / "resumed"))
    assert [one.metrics for one in resumed] == [one.metrics for one in plain]
    for name, mean in (("accuracy/mean", "accuracy/last_rounds"), ("loss/test", "loss/last_rounds")):
        values = [one.metrics.get(name) for one in compared]
        means = [one.metrics.get(mean) for one in compared]
        assert means[:3] == [values[0], None, values[2]]
        assert means[3:] == pytest.approx(
            [(values[3] + values[2]) / 2, (values[4] + values[2]) / 2, sum(values[4:]) / 2]
        )
        assert plain[5].metrics[mean] == means[5]


@pytest.mark.parametrize("metric", ["drift", "structural_bias"])
def test_metrics_of_the_evaluation_are_measured_in_the_same_rounds(federation, metric):
    changes = {"federation.rounds": 3, "federation.evaluate_every": 2, "evaluation.metrics": [metric]}
    found = [any(name.startswith(metric) for name in result.metrics) for result in federate(federation(changes))]
    assert found == [False, False, True, True]


def test_rounds_between_the_first_and_the_last_are_evaluated_on_some_images(federation):
    held_out = {"data.held_out_domains": ["noisy"], "federation.depths": [12]}
    small = federation({"federation.rounds": 3, "evaluation.images_per_domain": 4, **held_out})
    whole = sum(len(one.test) for one in small.domains)
    rounds = list(federate(small))
    assert [result.metrics[TESTED] for result in rounds] == [whole, 8, 8, whole]
    plain = list(federate(federation({"federation.rounds": 3, **held_out})))
    assert dict(rounds[3].metrics) == dict(plain[3].metrics)
    assert rounds[1].metrics["loss/test"] != plain[1].metrics["loss/test"]


def test_a_sample_has_the_same_share_of_each_class_and_depends_on_the_seed(federation):
    (domain, *_) = federation({}, test=60).domains
    for count in (1, 7, 20, 59):
        sample = stratified(domain, count, 0)
        assert len(sample.test) == count
        whole, part = (Counter(one.test.labels.tolist()) for one in (domain, sample))
        for label, size in whole.items():
            assert abs(part[label] - count * size / len(domain.test)) < 1 + 1e-9
        pixels = {tuple(image.flatten().tolist()) for image in domain.test.take(torch.arange(len(domain.test)))[0]}
        drawn = [tuple(image.flatten().tolist()) for image in sample.test.take(torch.arange(count))[0]]
        assert set(drawn) <= pixels
    assert identical(stratified(domain, 20, 0).test.labels, stratified(domain, 20, 0).test.labels)
    rows = [stratified(domain, 20, seed).test.take(torch.arange(20))[0] for seed in (0, 1)]
    assert not torch.equal(*rows)
    assert stratified(domain, 60, 0).test is domain.test


def counted(small, tmp_path):
    """Return the federation with an activation cache, and a list of the numbers of images that were computed."""
    seen: list[int] = []
    plain = small.model.forward

    def noting(images, walk=None):
        seen.append(len(images))
        return plain(images, walk)

    small.model.forward = noting
    sources = {part.data_ptr(): f"{one.name}/{n}" for one in small.domains for n, part in enumerate((*one.test.parts,))}
    reader = replace(small.trainer.reader, kept=FrozenRows(sources, tmp_path, 10**9))
    return replace(small, trainer=replace(small.trainer, reader=reader)), seen


@pytest.mark.parametrize(
    "change", [{"lora.rank": 2}, {"lora.position": "l1"}, {"method": "all_large"}, {"method": "flora"}, {}], ids=str
)
def test_arms_share_the_evaluation_of_the_untuned_model(federation, tmp_path, change):
    small, seen = counted(federation({}), tmp_path)
    first = small.evaluate(small.initial_state(), 0)
    assert sum(seen) >= sum(len(one.test) for one in small.domains)
    other, again = counted(federation(change), tmp_path)
    assert other.evaluate(other.initial_state(), 0) == first
    assert not again


def test_another_untuned_model_is_evaluated_anew(federation, tmp_path):
    small, _ = counted(federation({}), tmp_path)
    state = small.initial_state()
    small.evaluate(state, 0)
    other, again = counted(federation({}), tmp_path)
    reader = replace(other.trainer.reader, plain_identity="other weights")
    replace(other, trainer=replace(other.trainer, reader=reader)).evaluate(state, 0)
    assert again
    again.clear()
    head = {name: 2 * tensor for name, tensor in state.adapter.items() if "head" in name}
    other.evaluate(replace(state, adapter={**state.adapter, **head}), 0)
    assert again


def test_a_tuned_model_is_never_taken_for_the_untuned_one(federation, tmp_path):
    small, seen = counted(federation({"federation.rounds": 1}), tmp_path)
    start, end = federate(small)
    seen.clear()
    for result in (start, end):
        assert small.evaluate(result.state, 1)["loss/test"] == pytest.approx(result.metrics["loss/test"], rel=1e-5)
    assert len(seen) == 2  # one pass over all domains
    assert small.evaluate(end.state, 0)["loss/test"] == pytest.approx(end.metrics["loss/test"], rel=1e-5)
    assert start.metrics["loss/test"] != pytest.approx(end.metrics["loss/test"], rel=1e-3)
