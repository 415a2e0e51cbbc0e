"""The outer loop: rounds, cohorts, and what arms with the same seed share."""

from collections import Counter
from dataclasses import replace
from typing import ClassVar

import pytest

from fedsweep.federation import Federation, federate
from fedsweep.training import CohortTrainer, LocalTask
from fedsweep.types import Client, ClientUpdate
from tests.compare import identical


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


def test_one_client_of_each_domain_is_drawn_evenly(federation):
    skew = {"name": "feature_label_skew", "clients_per_domain": 3}
    small = federation({"partition": skew, "federation.clients_per_round": "one_per_domain"}, train=60)
    cohorts = [small.cohort(round) for round in range(1, 301)]
    assert all([client.domain for client in cohort] == ["inverted", "noisy", "plain"] for cohort in cohorts)
    assert all(ids(cohort) == sorted(ids(cohort)) for cohort in cohorts)
    taken = Counter(client.id for cohort in cohorts for client in cohort)
    assert len(taken) == 9
    assert all(70 <= times <= 130 for times in taken.values())  # 100 expected, deviation 8
    assert ids(small.cohort(7)) == ids(cohorts[6])
    assert len({tuple(ids(cohort)) for cohort in cohorts}) == 27  # domains draw independently


def test_arms_with_the_same_seed_share_split_cohort_and_initial_adapter(federation):
    base = {"federation.clients_per_round": 2, "seed": 5}
    changes = [{}, {"method": "all_small"}, {"optimizer.lr": 0.5}, {"lora.dropout": 0}]
    arms = [federation({**base, **change}) for change in changes]
    first = arms[0]
    for arm in arms[1:]:
        assert [ids(arm.cohort(round)) for round in range(20)] == [ids(first.cohort(round)) for round in range(20)]
        assert identical(arm.model.adapter(), first.model.adapter())
        assert identical([client.train for client in arm.clients], [client.train for client in first.clients])


class Listening(CohortTrainer):
    """A trainer whose rounds, tasks and updates stay in `heard`."""

    heard: ClassVar[list[tuple[int, list[LocalTask], list[ClientUpdate]]]] = []

    def fit(self, tasks):
        updates = super().fit(tasks)
        self.heard.append((self.round, list(tasks), updates))
        return updates


@pytest.fixture
def heard(monkeypatch):
    """What `Listening` hears."""
    monkeypatch.setattr(Listening, "heard", [])
    return Listening.heard


def listened(federation: Federation) -> Federation:
    return replace(federation, trainer=Listening(**vars(federation.trainer)))


def test_the_training_loss_is_weighted_by_images(federation, heard):
    _, result = federate(listened(federation({"federation.rounds": 1})))
    ((_, _, updates),) = heard
    weights = {"plain": 40, "inverted": 35, "noisy": 30}
    assert {update.client: update.num_examples for update in updates} == weights
    expected = sum(update.metrics["loss"] * weights[update.client] for update in updates) / 105
    assert result.metrics["loss/train"] == pytest.approx(expected, rel=1e-9)


def test_every_round_has_its_own_batches_and_allocation(federation, heard):
    list(federate(listened(federation({"method": "fedra", "federation.rounds": 3, "local.steps": 1}))))
    assert [round for round, _, _ in heard] == [1, 2, 3]
    assert len({tuple(task.allocation for task in tasks) for _, tasks, _ in heard}) == 3
