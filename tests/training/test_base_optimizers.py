"""FedAvg, FedProx and FedDyn, compared with tests/references/feddyn.py and combined with a method."""

import copy
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedsweep.common.errors import UserError
from fedsweep.federation.rounds import federate
from fedsweep.models.names import layer_of
from fedsweep.testing.compare import identical, identical_rounds, memory, moved
from fedsweep.training.aggregation import AggregationConfig, layerwise_mean
from fedsweep.training.base_optimizers import FedAvg, FedDyn, FedProx
from fedsweep.types import ClientUpdate, LayerAllocation, ServerState
from tests.references import feddyn as reference

NOBODY = LayerAllocation.of([])


class Quadratics:
    """Clients with quadratic losses L_k(x) = 1/2 (x - c_k)^T diag(q_k) (x - c_k), trained with a base optimizer."""

    def __init__(
        self, centres: np.ndarray, curvatures: np.ndarray, steps: int = 5, sizes: Sequence[int] | None = None
    ) -> None:
        self.centres, self.curvatures = torch.tensor(centres), torch.tensor(curvatures)
        self.lr, self.steps = 0.1, steps
        self.sizes = sizes or [1] * len(centres)

    def session(self, base: FedAvg | FedProx | FedDyn, state: ServerState, client: int) -> ClientUpdate:
        x = [state.adapter["x"].clone()]
        start, memory = [state.adapter["x"]], [state.client_memory.get(str(client), {}).get("x")]
        for _ in range(self.steps):
            gradients = base.steer([self.curvatures[client] * (x[0] - self.centres[client])], x, start, memory)
            x = [x[0] - self.lr * gradients[0]]
        return ClientUpdate(str(client), NOBODY, {"x": x[0]}, self.sizes[client], {})

    def play(
        self, base: FedAvg | FedProx | FedDyn, start: np.ndarray, cohorts: Sequence[Sequence[int]]
    ) -> list[np.ndarray]:
        state, seen = ServerState({"x": torch.tensor(start)}, ()), []
        shares = {str(client): size / sum(self.sizes) for client, size in enumerate(self.sizes)}
        for cohort in cohorts:
            updates = [self.session(base, state, client) for client in cohort]
            mean = layerwise_mean(state.adapter, updates, AggregationConfig())
            after = replace(state, adapter=mean)
            state = base.conclude(state, after, updates, shares)
            seen.append(state.adapter["x"].numpy())
        return seen


@given(st.integers(0, 2**31), st.sampled_from([0.05, 0.1, 1.0]))
def test_feddyn_is_the_papers_algorithm_for_any_cohorts_and_weights(seed, alpha):
    rng = np.random.default_rng(seed)
    centres, curvatures = rng.normal(size=(4, 3)), rng.uniform(0.5, 2.0, size=(4, 3))
    cohorts = [sorted(rng.choice(4, size=rng.integers(1, 5), replace=False).tolist()) for _ in range(6)]
    start, sizes = rng.normal(size=3), rng.integers(1, 50, size=4).tolist()
    ours = Quadratics(centres, curvatures, sizes=sizes).play(FedDyn(alpha=alpha), start, cohorts)
    theirs = reference.feddyn(start, centres, curvatures, np.array(sizes) / sum(sizes), cohorts, alpha, 0.1, 5)
    np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-9)


FACTORS = ("layer.lora_A.default.weight", "layer.lora_B.default.weight")


def factors_of(x: np.ndarray, full: int, rank: int) -> dict[str, torch.Tensor]:
    """Return A (rank, 3) and B (2, rank), whose values at the full rank are the first and the other values of `x`."""
    a, b = torch.tensor(x[: 3 * full]).view(full, 3), torch.tensor(x[3 * full :]).view(2, full)
    return dict(zip(FACTORS, (a[:rank], b[:, :rank]), strict=True))


def parts(tensors: dict[str, torch.Tensor], rank: int) -> list[torch.Tensor | None]:
    """Return the first `rank` rows of A and the first `rank` columns of B."""
    return [one[:, :rank] if "lora_B" in name else one[:rank] for name, one in tensors.items()]


@given(st.integers(0, 2**31), st.sampled_from([0.05, 1.0]))
def test_feddyn_with_unequal_ranks_corrects_the_rows_and_columns_that_the_cohort_holds(seed, alpha):
    rng = np.random.default_rng(seed)
    full, ranks, sizes = 4, [2, 4, 1, 2], rng.integers(1, 50, size=4).tolist()
    centres, curvatures = rng.normal(size=(4, 5 * full)), rng.uniform(0.5, 2.0, size=(4, 5 * full))
    cohorts = [sorted(rng.choice(4, size=rng.integers(1, 5), replace=False).tolist()) for _ in range(6)]
    start, base, shares = (
        rng.normal(size=5 * full),
        FedDyn(alpha=alpha),
        {str(k): sizes[k] / sum(sizes) for k in range(4)},
    )
    state, ours = ServerState(factors_of(start, full, full), ()), []
    for cohort in cohorts:
        updates = []
        for k in cohort:
            given = [one[:, : ranks[k]] if "lora_B" in name else one[: ranks[k]] for name, one in state.adapter.items()]
            known = state.client_memory.get(str(k), {})
            memory = [
                None
                if name not in known
                else known[name][:, : ranks[k]]
                if "lora_B" in name
                else known[name][: ranks[k]]
                for name in FACTORS
            ]
            centre, curve = (list(factors_of(one[k], full, ranks[k]).values()) for one in (centres, curvatures))
            x = [one.clone() for one in given]
            for _ in range(5):
                plain = [q * (one - c) for q, one, c in zip(curve, x, centre, strict=True)]
                x = [one - 0.1 * g for one, g in zip(x, base.steer(plain, x, given, memory), strict=True)]
            row = LayerAllocation((), (), rank=ranks[k])
            updates.append(ClientUpdate(str(k), row, dict(zip(FACTORS, x, strict=True)), sizes[k], {}))
        mean = layerwise_mean(state.adapter, updates, AggregationConfig())
        state = base.conclude(state, replace(state, adapter=mean), updates, shares)
        ours.append(np.concatenate([state.adapter[name].flatten().numpy() for name in FACTORS]))
    held = np.stack(
        [np.concatenate([np.repeat(np.arange(full) < r, 3), np.tile(np.arange(full) < r, 2)]) for r in ranks]
    )
    theirs = reference.feddyn(start, centres, curvatures, np.array([*shares.values()]), cohorts, alpha, 0.1, 5, held)
    np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-9)


def test_feddyn_finds_the_optimum_of_all_where_fedavg_does_not():
    centres = np.array([[4.0], [-1.0], [0.0]])
    curvatures = np.array([[0.2], [1.0], [3.0]])
    best = (centres * curvatures).sum() / curvatures.sum()
    played = Quadratics(centres, curvatures, steps=60)
    everyone = [[0, 1, 2]] * 60
    assert played.play(FedDyn(alpha=0.5), np.zeros(1), everyone)[-1] == pytest.approx(best, abs=1e-3)
    assert abs(played.play(FedAvg(), np.zeros(1), everyone)[-1] - best) > 0.5


def test_fedprox_descends_the_proximal_objective():
    rng = np.random.default_rng(0)
    centres, curvatures, start = rng.normal(size=(1, 3)), rng.uniform(0.5, 2.0, size=(1, 3)), rng.normal(size=3)
    (ours,) = Quadratics(centres, curvatures).play(FedProx(mu=0.7), start, [[0]])
    np.testing.assert_allclose(ours, reference.fedprox(start, centres[0], curvatures[0], 0.7, 0.1, 5), rtol=1e-12)


def test_fedprox_without_its_term_is_fedavg(federation):
    fedprox = federation({"base_optimizer": {"name": "fedprox", "mu": 0.0}, "federation.rounds": 1})
    assert identical_rounds(federate(fedprox), federate(federation({"federation.rounds": 1})))


def test_the_first_session_of_feddyn_equals_fedprox(federation):
    """FedDyn has not yet remembered a gradient, so its linear term is zero; the quadratic terms are equal."""
    strength = {"base_optimizer": {"name": "fedprox", "mu": 0.3}}, {"base_optimizer": {"name": "feddyn", "alpha": 0.3}}
    short = {"federation.rounds": 1, "local.steps": 3}  # the proximal term of the second step affects the third
    short |= {"data.domains": ["plain"], "federation.depths": [12]}
    losses = []
    for change in (*strength, {}):
        _, first = federate(federation({**change, **short}))
        losses.append(first.metrics["loss/train"])
    assert losses[0] == losses[1] != losses[2]


def test_feddyn_remembers_only_the_blocks_that_a_client_held(federation):
    small = federation({"base_optimizer": "feddyn", "federation.depths": [2, 1, 3]})
    start, first, second = federate(small)
    assert not start.state.client_memory
    for before, after in ((start, first), (first, second)):
        touched = {layer_of(name) for name in moved(before.state.adapter, after.state.adapter)}
        held = 12 - after.metrics["allocation/idle"]
        assert len(touched - {None}) == held
    layers = {client: {layer_of(name) for name in kept} for client, kept in first.state.client_memory.items()}
    assert {client: len(mine - {None}) for client, mine in layers.items()} == {"plain": 2, "inverted": 1, "noisy": 3}


@pytest.mark.parametrize("weights", ["samples", "uniform"])
def test_feddyn_remembers_a_clients_update(federation, weights):
    small = federation(
        {"base_optimizer": {"name": "feddyn", "alpha": 0.3}, "aggregation.weights": weights, "federation.rounds": 1}
    )
    start, first = federate(small)
    remembered = first.state.client_memory
    assert set(remembered) == {"plain", "inverted", "noisy"}
    head = "backbone.head.bias"
    total = sum(small.shares()[client] * kept[head] for client, kept in remembered.items())
    torch.testing.assert_close(first.state.server_memory[head], total)
    # theta = mean - h / alpha. The mean has changed by -h / alpha too, so theta changes by twice that amount.
    step = first.state.adapter[head] - start.state.adapter[head]
    torch.testing.assert_close(step, -2 * total / 0.3, rtol=1e-4, atol=1e-6)


def test_the_weights_of_clients_are_shares_of_all_clients(federation):
    shares = federation().shares()
    assert shares == pytest.approx({"plain": 40 / 105, "inverted": 35 / 105, "noisy": 30 / 105})
    alike = federation({"aggregation.weights": "uniform"}).shares()
    assert set(alike.values()) == {1 / 3}


def test_feddyn_with_product_svd_is_rejected(tiny):
    with pytest.raises(UserError, match="feddyn stores gradients of LoRA's A and B"):
        tiny.override({"base_optimizer": "feddyn", "aggregation.lora": "product_svd"}, "test")


def test_a_base_optimizer_changes_neither_states_nor_updates(federation):
    small = federation({"base_optimizer": "feddyn"})
    _, before, _ = federate(small)
    cohort = small.cohort(2)
    rows = small.method.allocate(before.state, cohort, small.server, np.random.default_rng(0))
    trainer = small.trainer.at(2, before.state.client_memory)
    updates = small.method.local_updates(before.state, cohort, rows, trainer)
    after = small.method.aggregate(before.state, updates, small.server)
    given = [before.state, after, updates]
    kept = [copy.deepcopy(one) for one in given]
    concluded = small.trainer.base.conclude(before.state, after, updates, small.shares())
    assert identical(given, kept)
    assert not memory(concluded.adapter) & memory(given)
