"""Clients that train together, compared with the same clients one after another over whole runs."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from fedsweep.common.errors import DivergenceError
from fedsweep.federation.rounds import Federation, federate
from fedsweep.models.activation_cache import FrozenRows
from fedsweep.models.layered import LayeredModel
from fedsweep.testing.compare import assert_close
from fedsweep.training import local_training
from fedsweep.training.local_training import CohortTrainer, LocalConfig, LocalTask, cross_entropy
from fedsweep.types import LayerAllocation, RoundListener

SEVERAL = {"federation.rounds": 3, "local.batch_size": 15}
CHANGES = {
    "fedra": {},
    "all_small": {"method": "all_small"},
    "inclusivefl": {"method": "inclusivefl"},
    "dropout": {"lora.dropout": 0.3},
    "fedprox": {"base_optimizer": {"name": "fedprox", "mu": 0.1}},
    "feddyn": {"base_optimizer": {"name": "feddyn", "alpha": 0.1}},
    "adam": {"optimizer": {"name": "adam", "lr": 1e-3}},
    "a frozen factor": {"aggregation.lora": "freeze_a"},
    "steps by number": {"local.steps": 5},
    "position l1": {"lora.position": "l1"},
    "unequal ranks": {"lora.rank": 4, "federation.ranks": [2, 4, 1]},
}


@pytest.fixture
def sizes(monkeypatch) -> list[int]:
    """Return a list to which the number of clients of each group is appended."""
    seen: list[int] = []
    for name in ("_fit_one", "_fit_together"):
        plain = getattr(CohortTrainer, name)

        def noting(self, trained, *rest, plain=plain):
            seen.append(1 if isinstance(trained, LocalTask) else len(trained))
            return plain(self, trained, *rest)

        monkeypatch.setattr(CohortTrainer, name, noting)
    return seen


def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_training, "JOINED_ON_CPU", 1)


@pytest.mark.parametrize("name", CHANGES)
def test_a_whole_run_is_the_same_except_for_rounding(federation, sizes, monkeypatch, name):
    runs = []
    for together in (True, False):
        if not together:
            alone(monkeypatch)
        small = federation({**SEVERAL, **CHANGES[name]})
        runs.append(list(federate(small)))
        assert max(sizes) == (3 if together else 1)
        sizes.clear()
    for ours, theirs in zip(*runs, strict=True):
        assert_close(ours.state.adapter, theirs.state.adapter)
        assert ours.metrics == pytest.approx(dict(theirs.metrics), rel=1e-3, abs=1e-4)


SCALED = {"lora.rank": 4, "federation.ranks": [2, 4, 1], "lora.alpha": 8.0, "lora.scaling": None}
METHODS = {
    "fedra": (1, "factors"),
    "frozen A": (1, "freeze_a"),
    "rolora, B": (1, "factors"),
    "rolora, A": (2, "factors"),
}


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("scaling", ["held", "over_rank"])
def test_clients_of_unequal_rank_have_the_same_updates(federation, sizes, monkeypatch, name, dropout, scaling):
    """In double precision, updates differ by rounding alone. The last of three batches has another size per client."""
    round, how = METHODS[name]
    found = []
    for together in (True, False):
        if not together:
            alone(monkeypatch)
        changes = {"method": "rolora" if "rolora" in name else "fedra", "lora.dropout": dropout}
        changes |= {"lora.rank_scaling": scaling, "aggregation.lora": how, "local.batch_size": 15, "local.steps": 3}
        small = federation({**SCALED, **changes})
        small.model.double()
        generator = torch.Generator().manual_seed(5)
        noise = {key: 0.1 * torch.randn(one.shape, generator=generator) for key, one in small.fresh.items()}
        small = replace(small, fresh={key: (one + noise[key]).double() for key, one in small.fresh.items()})
        state = small.initial_state()
        if round == 2:
            state = replace(state, factor="A")
        rows = small.allocate(state, small.clients, round)
        updates = small.method.local_updates(state, small.clients, rows, small.trainer.at(round))
        assert sizes == ([3] if together else [1, 1, 1])
        sizes.clear()
        found.append({update.client: update for update in updates})
    for client, ours in found[0].items():
        theirs = found[1][client]
        assert set(ours.adapter) == set(theirs.adapter)
        assert any("lora_" in key for key in ours.adapter)
        for key, tensor in ours.adapter.items():
            torch.testing.assert_close(tensor, theirs.adapter[key], rtol=1e-9, atol=1e-11)
    assert len(found[0]) == 3


def tasks(small: Federation, blocks: Callable[[int], list[int]]) -> list[LocalTask]:
    start = small.model.adapter()
    rows = [LayerAllocation.of(blocks(place)) for place in range(len(small.clients))]
    return [LocalTask(one, start, row, cross_entropy) for one, row in zip(small.clients, rows, strict=True)]


def test_cached_tokens_of_frozen_blocks_are_used(federation, sizes, tmp_path: Path):
    small = federation({})
    images = small.clients[0].train.parts
    kept = FrozenRows({part.data_ptr(): f"{n}" for one in small.clients for n, part in enumerate(one.train.parts)})
    kept.folder, kept.limit = tmp_path, 10**9
    trainer = replace(small.trainer, reader=replace(small.trainer.reader, kept=kept))
    given = tasks(small, lambda place: [2 * place, 9, 11])
    rows = [replace(one, allocation=LayerAllocation(one.allocation.held, (9, 11))) for one in given]
    found, plain = trainer.fit(rows), small.trainer.fit(rows)
    assert len(images) == 1
    assert sizes == [3, 3]
    assert list(tmp_path.iterdir())
    for ours, theirs in zip(found, plain, strict=True):
        assert_close(ours.adapter, theirs.adapter)


def test_groups_are_limited_and_balanced(federation, sizes, monkeypatch):
    small = federation({"partition": {"name": "feature_label_skew", "clients_per_domain": 2}})
    (pixels, _), config = small.clients[0].train.take(torch.tensor([0])), LocalConfig(batch_size=4, steps=1)
    tokens = small.model.embed(small.model.normalize(pixels)).numel()
    trainer = replace(small.trainer, local=config)
    limits = {1: [1] * 6, 2: [2, 2, 2], 3: [3, 3], 4: [3, 3], 5: [3, 3], 6: [6], 100: [6]}
    for limit, expected in limits.items():
        monkeypatch.setattr(local_training, "JOINED_ON_CPU", limit * tokens * config.batch_size)
        sizes.clear()
        updates = trainer.fit(tasks(small, lambda place: list(range(12))))
        assert sizes == expected
        assert [update.client for update in updates] == [client.id for client in small.clients]
    # Clients with half of the blocks fill a group only half.
    monkeypatch.setattr(local_training, "JOINED_ON_CPU", 3 * tokens * config.batch_size)
    sizes.clear()
    trainer.fit(tasks(small, lambda place: [place % 2 + 2 * block for block in range(6)]))
    assert sizes == [6]


def test_tasks_with_other_losses_or_starts_train_alone(federation, sizes):
    small = federation({})
    first, second, third = tasks(small, lambda place: [0, 4, 7])

    def other(*given):
        return cross_entropy(*given)

    for changed in (
        replace(second, objective=other),
        replace(second, start=dict(second.start)),
        replace(second, walk_at=lambda over: (0, 4, 7)),
        replace(second, side_inputs={"x": torch.zeros(len(second.client.train))}),
    ):
        small.trainer.fit([first, changed, third])
        assert sizes == [1, 1, 1]
        sizes.clear()


def test_the_model_is_left_as_it_was_sent(federation, sizes):
    """Clients that train together have tensors of their own, and the next group starts from those that were sent."""
    small = federation({})
    before = small.model.adapter()
    small.trainer.fit(tasks(small, lambda place: [0, 4, 7]))
    assert sizes == [3]
    assert all(torch.equal(before[name], tensor) for name, tensor in small.model.adapter().items())
    assert not any(module.training for module in small.model.modules())


def test_progress_reaches_the_number_of_clients(federation):
    class Noting(RoundListener):
        def __init__(self) -> None:
            self.seen: list[float] = []

        def training(self, done: float, clients: int) -> None:
            self.seen.append(done / clients)

    small, listener = federation({}), Noting()
    reader = replace(small.trainer.reader, listener=listener)
    replace(small.trainer, reader=reader).fit(tasks(small, lambda place: [0]))
    assert listener.seen == sorted(listener.seen)
    assert listener.seen[-1] == pytest.approx(1.0)
    assert np.diff([0.0, *listener.seen]).max() < 0.6


def test_a_client_that_diverges_in_a_group_is_named(federation, sizes):
    small = federation({})
    given = tasks(small, lambda place: [0, 4])
    config = small.trainer.optimizer.model_copy(update={"lr": 1e38, "clip_norm": None})
    with pytest.raises(DivergenceError, match="of client plain became"):
        replace(small.trainer, optimizer=config).fit(given)
    assert sizes == [3]
    assert isinstance(small.model, LayeredModel)
    assert not small.model.training
