"""The outer loop: rounds, cohorts, and what arms with the same seed share."""

from collections import Counter
from dataclasses import replace

import pytest

from fedsweep.checkpoint import Checkpoint, load, save
from fedsweep.experiment import build, run
from fedsweep.federation import federate
from fedsweep.training import CohortTrainer
from fedsweep.types import Client
from tests.compare import identical, identical_rounds


def ids(clients: list[Client]) -> list[str]:
    return [client.id for client in clients]


def test_rounds_are_numbered_from_the_untuned_model_on(federation):
    results = list(federate(federation({"federation.rounds": 3, "local.steps": 1})))
    assert [result.round for result in results] == [0, 1, 2, 3]
    assert "loss/train" not in results[0].metrics
    assert all(result.seconds > 0 for result in results)


def test_a_round_is_played_when_it_is_asked_for(federation):
    small = federation()
    rounds = federate(small)
    untuned = next(rounds)
    assert identical(small.model.adapter(), untuned.state.adapter)
    next(rounds)
    assert not identical(small.model.adapter(), untuned.state.adapter)


def test_all_clients_take_part_by_default(federation):
    small = federation()
    assert ids(small.cohort(1)) == ids(small.cohort(2)) == ["inverted", "noisy", "plain"]


def test_a_cohort_is_drawn_anew_each_round_without_repetition(federation):
    small = federation({"federation.clients_per_round": 2})
    cohorts = [ids(small.cohort(round)) for round in range(1, 301)]
    assert all(len(set(cohort)) == 2 for cohort in cohorts)
    taken = Counter(client for cohort in cohorts for client in cohort)
    assert len(taken) == 3
    assert all(160 <= times <= 240 for times in taken.values())  # 200 expected, deviation 8
    assert ids(small.cohort(7)) == cohorts[6]
    assert cohorts != [ids(replace(small, seed=1).cohort(round)) for round in range(1, 301)]


def test_arms_with_the_same_seed_share_split_cohort_and_initial_adapter(federation):
    base = {"federation.clients_per_round": 2, "seed": 5}
    changes = [{}, {"method": "all_small"}, {"optimizer.lr": 0.5}, {"lora.dropout": 0}]
    arms = [federation({**base, **change}) for change in changes]
    first = arms[0]
    for arm in arms[1:]:
        assert [ids(arm.cohort(round)) for round in range(20)] == [ids(first.cohort(round)) for round in range(20)]
        assert identical(arm.model.adapter(), first.model.adapter())
        assert identical([client.train for client in arm.clients], [client.train for client in first.clients])


def test_the_training_loss_is_weighted_by_images(federation):
    small = federation({"federation.rounds": 1})
    sent = []

    class Listening(CohortTrainer):
        def fit(self, tasks):
            sent.extend(super().fit(tasks))
            return list(sent)

    _, result = federate(replace(small, trainer=Listening(**vars(small.trainer))))
    weights = {"plain": 40, "inverted": 35, "noisy": 30}
    assert {update.client: update.num_examples for update in sent} == weights
    expected = sum(update.metrics["loss"] * weights[update.client] for update in sent) / 105
    assert result.metrics["loss/train"] == pytest.approx(expected, rel=1e-9)


def test_a_run_is_its_federation_played(tiny):
    config = tiny.override({"data.domains": ["plain"], "federation.depths": [4], "federation.rounds": 1}, "test")
    assert identical_rounds(run(config), federate(build(config)))


def test_a_built_federation_holds_what_its_config_says(tiny):
    built = build(tiny.override({"seed": 9}, "test"))
    assert [(client.id, client.capacity, len(client.train)) for client in built.clients] == [
        ("plain", 12, 1438), ("inverted", 6, 1438), ("noisy", 3, 1438),
    ]  # fmt: skip
    assert (built.seed, built.trainer.seed, built.server.num_layers, len(built.domains)) == (9, 9, 12, 3)
    assert not built.model.training


def test_a_run_resumes_from_a_checkpoint(tiny, tmp_path):
    config = tiny.override({"data.domains": ["plain"], "federation.depths": [4]}, "test")
    untuned, first, second = run(config)
    save(tmp_path / "checkpoint", Checkpoint(1, first.state, ()))
    resumed = list(run(config, resume=load(tmp_path / "checkpoint", like=untuned.state)))
    assert identical_rounds(resumed, [second])
    assert list(run(config, resume=Checkpoint(2, second.state, ()))) == []
