"""The loop over rounds, the cohorts, and the random choices that arms with the same seed share."""

from collections import Counter
from dataclasses import replace
from typing import ClassVar

import pytest

from fedsweep.common.errors import UserError
from fedsweep.federation.rounds import Federation, coverage, federate
from fedsweep.models import relative_norm
from fedsweep.testing.compare import identical, identical_rounds
from fedsweep.training.local_training import CohortTrainer, LocalTask
from fedsweep.types import Client, ClientUpdate, LayerAllocation, RoundListener, ServerState


def ids(clients: list[Client]) -> list[str]:
    return [client.id for client in clients]


def test_a_round_runs_when_it_is_requested_and_round_0_is_the_untuned_model(federation):
    small = federation({"local.steps": 1})
    rounds = federate(small)
    untuned = next(rounds)
    assert identical(small.model.adapter(), untuned.state.adapter)
    first = next(rounds)
    assert not identical(small.model.adapter(), untuned.state.adapter)
    results = [untuned, first, *rounds]
    assert [result.round for result in results] == [0, 1, 2]
    assert "loss/train" not in results[0].metrics
    assert all(result.seconds > 0 for result in results)


class Heard(RoundListener):
    """A listener that records what it learns."""

    def __init__(self) -> None:
        self.trained: list[tuple[float, int]] = []
        self.announced: list[int] = []
        self.tests: list[int] = []

    def training(self, done: float, clients: int) -> None:
        self.trained.append((done, clients))

    def testing(self, images: int) -> None:
        self.announced.append(images)
        self.tests.append(0)

    def tested(self, images: int) -> None:
        self.tests[-1] += images


def test_a_listener_follows_clients_and_test_images_and_changes_no_result(federation):
    quiet, heard = federation({"partition.test_share": 0.5}), Heard()
    trainer = replace(quiet.trainer, reader=replace(quiet.trainer.reader, listener=heard))
    silent = list(federate(quiet))
    assert identical_rounds(federate(replace(quiet, trainer=trainer)), silent)
    steps = [1.5, 3.0]  # three clients with two steps each, which train together
    assert heard.trained == [(done, 3) for done in steps] * 2
    own = sum(len(client.test) for client in quiet.clients)
    assert heard.announced == heard.tests == [sum(len(one.test) for one in quiet.domains) + own] * 3
    assert own > 0


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
    """A trainer that records its rounds, tasks and updates in `heard`."""

    heard: ClassVar[list[tuple[int, list[LocalTask], list[ClientUpdate]]]] = []

    def fit(self, tasks):
        updates = super().fit(tasks)
        self.heard.append((self.round, list(tasks), updates))
        return updates


@pytest.fixture
def heard(monkeypatch):
    """Return the empty list in which every `Listening` of a test records its rounds."""
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


def test_dynamic_depths_are_drawn_anew_for_every_client_and_round(federation):
    small = federation({"federation.depths": "dynamic"})
    drawn = {(round, client.id): client.capacity for round in range(1, 401) for client in small.cohort(round)}
    counts = Counter(drawn.values())
    assert set(counts) == set(range(1, 13))
    assert all(60 <= times <= 140 for times in counts.values())  # 100 expected, deviation 10
    first = [drawn[round, "plain"] for round in range(1, 401)]
    assert first != [drawn[round, "noisy"] for round in range(1, 401)]
    other = replace(small, seed=1)
    assert first != [other.cohort(round)[2].capacity for round in range(1, 401)]
    assert [client.capacity for client in small.cohort(7)] == [drawn[7, client.id] for client in small.cohort(7)]


def test_a_clients_drawn_depth_does_not_depend_on_the_cohort(federation):
    whole, part = (
        federation({"federation.depths": "dynamic", "federation.clients_per_round": size}) for size in (None, 1)
    )
    for round in range(1, 20):
        (alone,) = part.cohort(round)
        assert (alone.id, alone.capacity) in [(client.id, client.capacity) for client in whole.cohort(round)]


def test_dynamic_depths_resume_bit_identically(federation):
    changes = {"method": "inclusivefl", "federation.depths": "dynamic", "federation.rounds": 3, "local.steps": 1}
    straight = list(federate(federation(changes)))
    assert identical_rounds(federate(federation(changes), straight[2]), straight[3:])
    assert len({client.capacity for round in (1, 2, 3) for client in federation(changes).cohort(round)}) > 3


def test_dynamic_depths_with_ensure_cover_are_rejected(tiny):
    with pytest.raises(UserError, match="ensure_cover needs depths that sum to at least 12"):
        tiny.override({"federation.depths": "dynamic", "method.missing_layers": "ensure_cover"}, "test")


def holding(*rows: list[int]) -> dict[str, LayerAllocation]:
    return {f"client {number}": LayerAllocation.of(row) for number, row in enumerate(rows)}


def test_gamma_is_the_smallest_number_of_clients_that_hold_an_active_block():
    state = ServerState({}, (0, 1, 2, 3))
    first = coverage(state, holding([0, 1], [0, 1], [0, 2]))
    assert first == {"allocation/gamma": 1.0, "allocation/gamma_star": 1.0, "allocation/idle": 1.0}
    assert coverage(state, holding([0, 1], [0, 1]))["allocation/gamma"] == 2.0
    later = coverage(replace(state, gamma_star=1), holding([0, 1], [0, 1]))
    assert (later["allocation/gamma"], later["allocation/gamma_star"]) == (2.0, 1.0)


def test_gamma_star_is_the_smallest_gamma_so_far_and_is_kept_after_a_stop(federation):
    changes = {"method": "fedra", "federation.depths": [8, 6, 3], "federation.rounds": 4, "local.steps": 1}
    results = list(federate(federation(changes)))
    gammas = [result.metrics["allocation/gamma"] for result in results[1:]]
    stars = [result.metrics["allocation/gamma_star"] for result in results[1:]]
    assert stars == [min(gammas[: place + 1]) for place in range(4)]
    assert [result.state.gamma_star for result in results] == [None, *stars]
    (resumed,) = federate(federation(changes), results[3])
    assert resumed.metrics["allocation/gamma_star"] == stars[3]


def test_only_the_largest_clients_hold_the_top_block_of_prefixes(federation):
    """A top block with few holders explains InclusiveFL's small Gamma* (FedRA, second version, below Theorem 1)."""
    changes = {"federation.depths": [12, 6, 3], "federation.rounds": 1, "local.steps": 1}
    _, prefix = federate(federation({**changes, "method": "inclusivefl"}))
    _, large = federate(federation({**changes, "method": "all_large"}))
    assert prefix.metrics["allocation/gamma"] == 1.0
    assert large.metrics["allocation/gamma"] == 3.0


@pytest.mark.parametrize("method", ["fedra", "all_small"])
def test_the_relative_norm_is_that_of_the_servers_state_in_every_round(federation, method):
    small = federation({"method": method, "federation.rounds": 2, "federation.depths": [5, 3, 4]})
    _, *rounds = federate(small)
    assert 0 < rounds[0].metrics["lora/relative_norm"] != rounds[1].metrics["lora/relative_norm"]
    for result in rounds:
        small.model.load_adapter(result.state.adapter)
        assert relative_norm(small.model, result.state.layers) == result.metrics["lora/relative_norm"]


@pytest.mark.parametrize(("rule", "identities"), [("factors", 1), ("freeze_a", 2)])
def test_runs_with_different_seeds_share_a_frozen_part_unless_it_is_drawn(federation, rule, identities):
    runs = [federation({"aggregation.lora": rule, "seed": seed}) for seed in (0, 1)]
    assert len({one.trainer.reader.identity for one in runs}) == identities
