"""The costs of a client: FLOPs against formulas, memory against recorded allocations, bytes against a real round."""

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from fedsweep.common.randomness import stream
from fedsweep.federation.build_and_run import build
from fedsweep.federation.client_costs import ClientCosts, CostCounter, client_costs, cost_counter, largest_cohort
from fedsweep.federation.rounds import Federation, federate
from fedsweep.federation.run_config import RunConfig
from fedsweep.methods.fedra import FedRA
from fedsweep.models.names import not_folded
from fedsweep.models.sessions import DropoutMasks
from fedsweep.testing.cases import METHODS, SLOW, changes_for, label
from fedsweep.training.local_training import LocalConfig

WIDTH, MLP, TOKENS, PATCHES, CLASSES = 64, 128, 17, 16, 10
"""The sizes of `digits_vit`."""
VIT = {"name": "timm", "model": "vit_tiny_patch16_224", "pretrained": "none", "img_size": 16, "patch_size": 4}
WIDE = {**VIT, "embed_dim": 288, "num_blocks": 6, "num_heads": 3}
"""A ViT that is so wide that LoRA on a CPU uses the same products as on a GPU."""


def costs_of(config: RunConfig, depth: int) -> ClientCosts:
    client = replace(cost_counter(config, CLASSES).clients[0], capacity=depth)
    return client_costs(config, CLASSES, client)


def expected_flops(depth: int, rank: int, batch: int) -> tuple[int, int]:
    """Return the FLOPs of the forward and the backward pass of LoRA in both sublayers of the first blocks.

    A product of a matrix (m, k) and a matrix (k, n) takes 2 m k n FLOPs. The fused backward pass of attention has five
    products: it computes the attention weights again. The lowest block needs no gradient of its input, so that the
    gradients end at its first adapter.
    """
    d, rows = WIDTH, batch * TOKENS
    product = 2 * batch * TOKENS * TOKENS * d  # one product of attention, over all heads
    lora = {"proj": 2 * rows * rank * (d + d), "fc2": 2 * rows * rank * (MLP + d)}
    block = 2 * rows * d * (3 * d + d + 2 * MLP) + 2 * product + sum(lora.values())
    whole = 2 * rows * d * (3 * d + d + 2 * MLP) + 5 * product + 2 * sum(lora.values())
    lowest = whole - 2 * rows * d * (3 * d + d) - 5 * product - 2 * rows * rank * d
    head = 2 * batch * d * CLASSES
    return 2 * batch * PATCHES * 48 * d + depth * block + head, lowest + (depth - 1) * whole + 2 * head


@pytest.mark.parametrize(("rank", "batch"), [(1, 8), (4, 8), (4, 3)])
@pytest.mark.parametrize("depth", [1, 2, 5])
def test_flops_equal_a_formula(tiny, depth, rank, batch):
    config = tiny.override({"lora.rank": rank, "local.batch_size": batch, "method": "inclusivefl"}, "test")
    costs = costs_of(config, depth)
    assert (costs.forward, costs.backward) == expected_flops(depth, rank, batch)


def test_flops_equal_those_of_a_real_step(wide):
    """Torch's counter sees the operations of training on the CPU, including its fused attention."""
    config = wide({"local.steps": 1, "method": {"name": "depthfl", "heads": [1, 3]}})
    costs, train = trained(build(config), config, 1)
    with FlopCounterMode(display=False) as counter:
        train()
    assert counter.get_total_flops() == costs.flops_per_step


def test_costs_are_affine_in_the_depth_and_in_the_batch(tiny):
    config = tiny.override({"method": "inclusivefl"}, "test")
    counted = [costs_of(config, depth) for depth in (2, 5, 8, 11)]
    for name in ("bytes_down", "bytes_up", "trained", "weights", "forward", "backward", "memory"):
        values = [getattr(one, name) for one in counted]
        steps = {after - before for before, after in pairwise(values)}
        assert len(steps) == 1, name
        assert steps.pop() > 0
    batches = [costs_of(config.override({"local.batch_size": size}, "test"), 6) for size in (4, 8, 12)]
    for name in ("forward", "backward", "memory"):
        first, second, third = (getattr(one, name) for one in batches)
        assert second - first == third - second > 0


def peak_of(work: Callable[[], object], folder: Path) -> int:
    """Return the peak of the bytes that `work` allocates on the CPU, as torch's profiler records them."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        work()
    path = folder / "trace.json"
    recorded.export_chrome_trace(str(path))
    events = [one for one in json.loads(path.read_text())["traceEvents"] if one.get("name") == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda one: one["ts"]):
        live += event["args"]["Bytes"]
        peak = max(peak, live)
    return peak


def drawn_by_torch(self: DropoutMasks, like: torch.Tensor, rate: float) -> torch.Tensor:
    """Return a mask that torch's profiler sees; on a CPU, the masks of a run are allocated by NumPy."""
    return torch.empty_like(like).bernoulli_(1 - rate).div_(1 - rate)


def trained(federation: Federation, config: RunConfig, place: int) -> tuple[ClientCosts, Callable[[], object]]:
    """Return the counted costs of a client, and a function that trains this client alone."""
    state, client, method = federation.initial_state(), federation.clients[place], federation.method
    for layer in federation.model.modules():  # a client keeps only the sum of its weights and the folded changes
        layer._buffers.pop("folded", None)
    state = replace(state, adapter={name: state.adapter[name] for name in not_folded(state.adapter)})
    counter = CostCounter(config, CLASSES)
    stage = next(iter(counter.states))
    row, trainer = counter.row(client, stage), replace(federation.trainer, round=1)
    return counter.costs(client, row, stage), lambda: method.local_updates(state, [client], {client.id: row}, trainer)


def ratio_of_peaks(config: RunConfig, place: int, folder: Path) -> float:
    """Return the counted memory of a client, divided by the memory of its real training."""
    costs, train = trained(build(config), config, place)
    assert costs.memory is not None
    return costs.memory / (costs.weights + peak_of(train, folder))


@pytest.fixture
def wide(experiment, monkeypatch) -> Callable[..., RunConfig]:
    monkeypatch.setattr(DropoutMasks, "next", drawn_by_torch)
    small = {"local.steps": 2, "federation.depths": [6, 3, 1], "data.domains": ["plain", "inverted", "noisy"]}
    given = {"backbone": WIDE, "method": "inclusivefl", "lora.dropout": 0.1, "local.batch_size": 8}

    def config(changes: dict) -> RunConfig:
        return experiment.override({**small, **given, **changes}, "test")

    return config


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize(("place", "rank", "batch"), [(0, 64, 4), (1, 1, 2), (1, 8, 32), (2, 64, 8)])
def test_memory_is_the_peak_of_real_training(wide, tmp_path, place, rank, batch, optimizer):
    config = wide({"lora.rank": rank, "local.batch_size": batch, "optimizer": optimizer})
    assert ratio_of_peaks(config, place, tmp_path) == pytest.approx(1, abs=0.01)


@pytest.mark.parametrize(
    "changes",
    [
        {"method": "ft", "optimizer": "adam"},
        {"method": "lfft"},
        {"method": {"name": "fedot", "bottom": 1, "top": 1}},
        {"method": {"name": "depthfl", "heads": [1, 3]}},
        {"lora.dropout": 0.0},
    ],
    ids=str,
)
def test_memory_is_the_peak_of_real_training_with_other_methods(wide, tmp_path, changes):
    assert ratio_of_peaks(wide(changes), 1, tmp_path) == pytest.approx(1, abs=0.01)


RULES: list[str | dict] = ["hetlora", "flexlora", "raflora", "flora", "fedsa_lora", "fedex_lora", "rolora"]


@pytest.mark.parametrize("rank", [16, 2])
@pytest.mark.parametrize("method", [*RULES, {"name": "hetlora", "gamma": 1}], ids=str)
def test_memory_is_the_peak_of_real_training_with_unequal_ranks(wide, tmp_path, method, rank):
    config = wide({"method": method, "lora.rank": 16, "federation.ranks": [16, rank, 16]})
    copy = 0.04 if rank == 16 else 0  # of the factors, which the simulation cuts to the client's rank
    assert ratio_of_peaks(config, 1, tmp_path) == pytest.approx(1 - copy / 2, abs=0.01 + copy / 2)


def test_memory_is_the_peak_of_both_stages_of_fedbrick(wide, tmp_path):
    config = wide({"method": "fedbrick", "partition.proxy_share": 0.1})
    assert ratio_of_peaks(config, 1, tmp_path) == pytest.approx(1, abs=0.01)


def test_base_optimizers_that_remember_tensors_take_more_memory(wide):
    plain, prox, dyn = (
        costs_of(wide({"base_optimizer": name, "optimizer": "adam", "method": "ft"}), 6)
        for name in ("fedavg", "fedprox", "feddyn")
    )
    assert prox.memory > plain.memory + 4 * plain.trained  # a copy of the server's tensors
    assert dyn.memory >= prox.memory + 4 * plain.trained  # and a gradient


@pytest.mark.gpu
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_memory_is_the_peak_on_a_gpu(wide, monkeypatch, optimizer):
    monkeypatch.undo()
    config = wide({"local.batch_size": 256, "optimizer": optimizer})
    costs, train = trained(build(config, "cuda"), config, 0)
    train()  # the libraries allocate their work space
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    train()
    peak = costs.weights + torch.cuda.max_memory_allocated() - before
    assert costs.memory == pytest.approx(peak, rel=0.1)


CASES = [pytest.param(one, id=label(one), marks=[pytest.mark.slow] if label(one) in SLOW else []) for one in METHODS]


@pytest.mark.parametrize("method", CASES)
def test_every_method_can_be_counted(tiny, random_clip, method):
    config = tiny.override(changes_for(method, random_clip), "test")
    counter = cost_counter(config, ("zero", "one", "two"))
    for stage in counter.states:
        for client in counter.clients[1:2]:
            costs = counter.costs(client, stage=stage)
            if method["name"] == "zero_shot":
                assert (costs.flops_per_step, costs.memory, costs.trained) == (0, None, 0)
                assert costs.missing == "`method` zero_shot trains nothing."
            else:
                assert costs.missing == ""
                assert costs.forward > 0
                assert costs.backward > 0
                assert costs.memory > costs.weights >= 4 * costs.trained > 0


ROUNDS: list[tuple[dict, Literal["", "stage 2"]]] = [
    ({"name": "fedra"}, ""),
    ({"name": "fedbrick", "parallel": False}, ""),
    ({"name": "depthfl"}, ""),
    ({"name": "ft"}, ""),
    ({"name": "fedms", "global_rounds": 0, "gate": {"trunk": {"name": "digits_resnet"}}}, "stage 2"),
]


@pytest.mark.parametrize(("method", "stage"), ROUNDS, ids=str)
def test_bytes_equal_those_of_a_round(federation, tiny, random_clip, method, stage):
    changes = {**changes_for(method, random_clip), "federation.rounds": 1}
    _, result = federate(federation(changes, train=24, test=4))
    config = tiny.override(changes, "test")
    counter = cost_counter(config, CLASSES)
    counted = [counter.costs(client, stage=stage) for client in counter.clients]
    assert sum(one.bytes_down for one in counted) == result.metrics["bytes/down"]
    assert sum(one.bytes_up for one in counted) == result.metrics["bytes/up"]
    if not stage:  # in stage two, the counts assume that all blocks are active
        assert sum(one.trained for one in counted) / len(counted) == result.metrics["parameters/trained"]


def test_a_stack_grows_with_the_ranks_of_the_cohort(tiny):
    """A layer's stack has as many rows as the ranks of the largest cohort together."""

    ranks = {"lora.rank": 4, "federation.depths": [12], "federation.ranks": [4, 3, 2]}

    def down(**changes):
        config = tiny.override({**ranks, "method": "flora", **changes}, "test")
        counter = cost_counter(config, CLASSES)
        (found,) = {counter.costs(client).bytes_down for client in counter.clients}
        return found

    alone = down(**{"federation.clients_per_round": 1})
    per_row = (alone - down(**{"federation.rounds": 1})) / 4
    assert per_row == 4 * 12 * (64 + 64 + 128 + 64)
    assert down(**{"federation.clients_per_round": 2}) == alone + 3 * per_row
    assert down() == alone + 5 * per_row
    assert down(**{"federation.ranks": "dynamic"}) == alone + 8 * per_row


@pytest.mark.parametrize("size", [None, 2, "one_per_domain"])
def test_the_largest_cohort_has_the_largest_clients(tiny, size):
    """Each domain has two clients, of which the first one has fewer blocks."""
    two = {"name": "feature_label_skew", "clients_per_domain": 2}
    changes = {"partition": two, "federation.depths": [2, 3, 4, 9, 5, 6], "federation.clients_per_round": size}
    found = sorted(client.capacity for client in largest_cohort(tiny.override({"method": "flora", **changes}, "test")))
    assert found == {None: [2, 3, 4, 5, 6, 9], 2: [6, 9], "one_per_domain": [3, 6, 9]}[size]


def test_a_text_encoder_needs_the_names_of_the_classes(tiny, random_clip):
    config = tiny.override(changes_for({"name": "promptfl", "context": 4}, random_clip), "test")
    unknown, short, long = (
        counter.costs(counter.clients[0])
        for counter in (cost_counter(config, names) for names in (2, ("one", "two"), ("one", "two hundred and two")))
    )
    assert unknown.missing.startswith("FLOPs and memory of a text encoder depend on the lengths of the class names")
    assert unknown.forward is unknown.backward is unknown.memory is unknown.flops_per_step is None
    assert short.forward < long.forward
    assert short.bytes_up == unknown.bytes_up


def test_runs_with_equal_shapes_share_a_counter(tiny):
    first = cost_counter(tiny, CLASSES)
    assert first is cost_counter(tiny.override({"seed": 3, "optimizer.lr": 0.5}, "test"), CLASSES)
    assert first is not cost_counter(tiny.override({"lora.rank": 2}, "test"), CLASSES)
    assert first is not cost_counter(tiny.override({"local.batch_size": 2}, "test"), CLASSES)
    assert first.costs(first.clients[0]) is client_costs(tiny, CLASSES, first.clients[0])


def test_a_round_is_a_number_of_steps(tiny):
    costs = costs_of(tiny, 3)
    local = LocalConfig(batch_size=8, steps="epoch", epochs=2)
    assert costs.flops_per_round(local, images=20, fewest=20) == 2 * 3 * costs.flops_per_step


def test_a_block_for_every_layer_is_not_required_of_a_single_client(tiny):
    config = tiny.override({"method": {"name": "fedra", "missing_layers": "ensure_cover"}}, "test")
    client = cost_counter(config, CLASSES).clients[2]
    assert len(cost_counter(config, CLASSES).row(client).held) == client.capacity == 3


class ReadsValues(FedRA):
    """A method that uses the values of the trained tensors."""

    def local_updates(self, state, cohort, allocations, trainer):
        updates = super().local_updates(state, cohort, allocations, trainer)
        updates[0].adapter["backbone.head.bias"].sum().item()
        return updates


class TrainsAlone(FedRA):
    """A method that trains without the trainer."""

    def local_updates(self, state, cohort, allocations, trainer):
        return []


@pytest.mark.parametrize(
    ("method", "reason"),
    [(ReadsValues(), "cannot be counted without data: "), (TrainsAlone(), "does not train clients with `trainer.fit`")],
)
def test_what_cannot_be_counted_has_a_reason(tiny, method, reason):
    counter = CostCounter(tiny.model_copy(update={"method": method}), CLASSES)
    costs = counter.costs(counter.clients[0])
    assert reason in costs.missing
    assert costs.forward is costs.backward is costs.memory is costs.flops_per_step is None
    assert costs.flops_per_round(tiny.local, 10, 10) is None


def test_bfloat16_has_flops_but_no_memory(tiny):
    plain, rounded = costs_of(tiny, 3), costs_of(tiny.override({"precision": "bfloat16"}, "test"), 3)
    assert rounded.forward == plain.forward
    assert rounded.memory is None
    assert "`precision` bfloat16" in rounded.missing


def test_counting_leaves_the_model_as_it_was(tiny):
    counter = CostCounter(tiny.override({"method": "fedbrick", "partition.proxy_share": 0.1}, "test"), CLASSES)
    before = {name: one.requires_grad for name, one in counter.model.named_parameters()}
    row = counter.config.method.allocate(
        counter.states[""], counter.clients, counter.server, stream(0, "allocation", 1)
    )
    first = counter._counted(counter.clients[0], row[counter.clients[0].id], "", count_step=True, down=0)
    again = counter._counted(counter.clients[0], row[counter.clients[0].id], "", count_step=True, down=0)
    assert first == again
    assert before == {name: one.requires_grad for name, one in counter.model.named_parameters()}
    assert not counter.model.training
