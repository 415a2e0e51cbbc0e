"""The simulated time of rounds: a formula by hand, the slowest client, and the runs that have no such time."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from fedsweep.cli import early_check
from fedsweep.common.errors import UserError
from fedsweep.federation import simulated_time
from fedsweep.federation.build_and_run import build, check_content, run_resumably
from fedsweep.federation.client_costs import CostCounter, client_costs
from fedsweep.federation.devices import PROFILES
from fedsweep.federation.rounds import federate
from fedsweep.federation.simulated_time import Clock, check_devices
from fedsweep.methods.capabilities import Messages, Stages
from fedsweep.methods.fedra import FedRA
from fedsweep.results.history import SIMULATED, over_the_run
from fedsweep.testing.cases import METHODS, SLOW, changes_for, label
from fedsweep.types import LayerAllocation

SLOW_DEVICE = {"flops_per_second": 1e8, "megabytes_per_second_up": 0.01, "megabytes_per_second_down": 0.02}
FAST_DEVICE = {"flops_per_second": 1e12, "megabytes_per_second_up": 100.0, "megabytes_per_second_down": 100.0}
CASES = [pytest.param(one, id=label(one), marks=[pytest.mark.slow] if label(one) in SLOW else []) for one in METHODS]


def seconds(history):
    return [one.metrics[SIMULATED] for one in history if one.round]


@pytest.fixture
def times(federation):
    """Return a function that runs a small federation with the given devices, and returns the seconds of its rounds."""

    def measure(devices, **changes):
        return seconds(federate(federation({"method": "inclusivefl", **changes, "devices": devices}, train=24, test=4)))

    return measure


def by_hand(config, clients, device):
    """Return each client's seconds in a round, from the bytes and FLOPs of its sub-model."""
    fewest, found = min(len(one.train) for one in clients), []
    for client in clients:
        costs = client_costs(config, 10, client)
        flops = costs.flops_per_step * config.local.steps_for(len(client.train), fewest)
        found.append(
            costs.bytes_down / (1e6 * device["megabytes_per_second_down"])
            + flops / device["flops_per_second"]
            + costs.bytes_up / (1e6 * device["megabytes_per_second_up"])
        )
    return found


@pytest.mark.parametrize("steps", [2, "epoch"])
def test_a_round_lasts_as_long_as_download_training_and_upload_of_the_slowest_client(federation, tiny, steps):
    changes = {"method": "inclusivefl", "local.steps": steps, "devices": [SLOW_DEVICE]}
    whole = federation(changes, train=24, test=4)
    each = by_hand(tiny.override(changes, "test"), whole.clients, SLOW_DEVICE)
    assert each[0] > each[1] > each[2]  # the clients hold 12, 6 and 3 blocks
    assert seconds(federate(whole)) == pytest.approx([each[0]] * 2)


def test_the_slowest_client_decides(federation, tiny, times):
    devices = [FAST_DEVICE, FAST_DEVICE, SLOW_DEVICE]
    changes = {"method": "inclusivefl", "devices": devices}
    clients = federation(changes, train=24, test=4).clients
    last = by_hand(tiny.override(changes, "test"), clients, SLOW_DEVICE)[2]
    assert times(devices) == pytest.approx([last, last])
    assert times([FAST_DEVICE]) < times(devices) < times([SLOW_DEVICE])


def test_half_the_speeds_take_twice_the_time(times):
    half = {name: value / 2 for name, value in SLOW_DEVICE.items()}
    assert times([half]) == pytest.approx([2 * one for one in times([SLOW_DEVICE])])


def test_a_name_stands_for_its_profile(times):
    for name, profile in PROFILES.items():
        assert times([name]) == times([profile.model_dump()]) == times([name] * 3)
    assert times(["phone"]) > times(["laptop"]) > times(["jetson"])


def test_devices_change_no_other_metric_and_the_order_of_clients_changes_nothing(federation):
    changes = {"devices": ["phone", "laptop", "jetson"]}
    plain, timed = federation({}, train=24, test=4), federation(changes, train=24, test=4)
    turned = replace(timed, clients=timed.clients[::-1])
    results = [[one.metrics for one in federate(each)] for each in (plain, timed, turned)]
    for without, one, other in zip(*results, strict=True):
        assert {name: value for name, value in one.items() if name != SIMULATED} == without
        assert one.get(SIMULATED) == other.get(SIMULATED)


def test_the_metric_is_promised_if_devices_are_given(tiny, federation):
    timed = tiny.override({"devices": ["phone"]}, "test")
    assert {*timed.metrics()} - {*tiny.metrics()} == {SIMULATED}
    assert SIMULATED in early_check.metrics(timed)
    assert SIMULATED not in early_check.metrics(tiny)
    untuned, first, _ = federate(federation({"devices": ["phone"]}, train=24, test=4))
    assert SIMULATED not in untuned.metrics
    assert {*first.metrics} == {*timed.metrics()}


def test_a_resumed_run_has_the_same_times(tiny, tmp_path):
    config = tiny.override({"devices": ["phone", "laptop", "jetson"]}, "test")
    straight = list(run_resumably(config, tmp_path / "straight"))
    assert len(list(run_resumably(config, tmp_path / "resumed", until=1))) == 2
    assert seconds(run_resumably(config, tmp_path / "resumed")) == seconds(straight)
    assert over_the_run(straight, SIMULATED) == sum(seconds(straight))


def test_profiles_are_listed_for_clients_domains_or_once(tiny):
    two = {"partition": {"name": "feature_label_skew", "clients_per_domain": 2}, "federation.depths": [3]}
    config = tiny.override({**two, "devices": ["phone", "laptop", "jetson"]}, "test")
    kinds = {client: PROFILES[name] for client, name in zip(config.client_domains(), ["phone"] * 6, strict=True)}
    of_domain = dict(zip(config.data.training_domains, ("phone", "laptop", "jetson"), strict=True))
    expected = {client: PROFILES[of_domain[domain]] for client, domain in config.client_domains().items()}
    assert config.client_devices() == expected
    assert config.override({"devices": ["phone"]}, "test").client_devices() == kinds
    assert tiny.client_devices() == {}


@pytest.mark.parametrize("method", CASES)
def test_every_method_has_a_time(tiny, random_clip, method):
    config = tiny.override({**changes_for(method, random_clip), "devices": ["phone"]}, "test")
    check_devices(config)
    clock = Clock.of(config, 8)
    stages = Stages.of_method(config.method)
    for stage, state in clock.counter.states.items():
        assert stages.stage_of(state) == stage
        client = clock.counter.clients[0]
        row = clock.counter.row(client, stage)
        assert clock.flops_per_step(state, client, row) == clock.counter.costs(client, row, stage).flops_per_step


ROWS = [(0, 4, 7), (3, 4, 9), (3, 9, 11), (5, 6, 7)]


@pytest.mark.parametrize(
    ("method", "most"),
    [({"name": "fedra"}, 1), ({"name": "fedbrick"}, 3), ({"name": "fedbrick", "parallel": False}, 3)],
    ids=str,
)
def test_random_allocations_of_equal_size_are_counted_once(tiny, random_clip, monkeypatch, method, most):
    """Blocks are interchangeable, except that the lowest block also counts if there are BRICKs."""
    config = tiny.override({**changes_for(method, random_clip), "devices": ["phone"]}, "test")
    clock, plain = Clock.of(config, 8), Clock.of(config, 8)
    client = replace(clock.counter.clients[1], capacity=3)
    (state,) = clock.counter.states.values()
    row = clock.counter.row(client)
    rows = [replace(row, held=held, trained=held) for held in ROWS]
    counted, count = [], CostCounter.costs
    monkeypatch.setattr(CostCounter, "costs", lambda *asked: counted.append(asked) or count(*asked))
    flops = [clock.flops_per_step(state, client, one) for one in rows]
    assert len(counted) == most
    for one, found in zip(rows, flops, strict=True):
        assert replace(plain, _known={}).flops_per_step(state, client, one) == found


def test_allocations_of_other_sizes_differ(tiny):
    clock = Clock.of(tiny.override({"devices": ["phone"]}, "test"), 8)
    client, (state,) = clock.counter.clients[0], clock.counter.states.values()
    rows = [LayerAllocation((0, 1, 2), (2,)), LayerAllocation((0, 1, 2), (0,)), LayerAllocation.of((0, 1, 2, 3))]
    for rank in (2, 4, 8):
        rows.append(replace(rows[2], rank=rank))
    flops = [clock.flops_per_step(state, client, one) for one in rows]
    assert all(one < other for one, other in pairwise(flops[:3]))
    assert flops[3] < flops[4] < flops[5] == flops[2]


class Broadcasting(FedRA, Messages):
    """A method whose server sends 4000 bytes to every client of the run before a round."""

    def broadcast(self, state):
        return {"x": torch.zeros(1000)}


@pytest.fixture
def uncached(monkeypatch):
    """Count the costs of each run anew, because the cache knows methods only by their names."""
    monkeypatch.setattr(simulated_time, "cost_counter", CostCounter)


@pytest.mark.usefixtures("uncached")
def test_bytes_of_a_broadcast_count_for_each_client(federation):
    whole = federation({"devices": [SLOW_DEVICE]}, train=24, test=4)
    config = whole.clock.config.model_copy(update={"method": Broadcasting()})
    other = replace(whole, method=config.method, clock=Clock.of(config, whole.clock.fewest))
    assert seconds(federate(other)) == pytest.approx([one + 4000 / 2e4 for one in seconds(federate(whole))])


class TrainsAlone(FedRA):
    """A method that trains without the trainer, so that its FLOPs are unknown."""

    def local_updates(self, state, cohort, allocations, trainer):
        return []


@pytest.mark.usefixtures("uncached")
def test_a_run_whose_flops_are_unknown_is_rejected_before_it_starts(tiny):
    config = tiny.override({"devices": ["phone"]}, "test").model_copy(update={"method": TrainsAlone()})
    reason = "`devices` need the FLOPs of training, which are unknown: `method` fedra does not train clients"
    for check in (check_devices, check_content):
        with pytest.raises(UserError, match=reason):
            check(config)
    check_content(tiny.model_copy(update={"method": TrainsAlone()}))
    assert build(tiny).clock is None
