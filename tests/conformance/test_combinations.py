"""Every method with each base optimizer, on an MLP-Mixer and on a CLIP model."""

from dataclasses import replace

import pytest
import torch

from fedsweep.common.errors import UserError
from fedsweep.common.randomness import stream
from fedsweep.federation.rounds import federate
from fedsweep.methods.capabilities import LoraRule, SeparateModels
from fedsweep.models.names import folded_name, layer_of
from fedsweep.results.checkpoint import Checkpoint, load, save
from fedsweep.testing.compare import identical, identical_rounds, moved
from fedsweep.testing.rounds import one_round
from fedsweep.types import RoundResult, ServerState
from tests.conformance.conftest import method_of

STRONG = [{"name": "fedprox", "mu": 1.0}, {"name": "feddyn", "alpha": 1.0}]


@pytest.mark.slow
@pytest.mark.parametrize("base", STRONG, ids=lambda base: base["name"])
def test_every_base_optimizer_combines_with_the_method(federation, name, chosen, base, tmp_path):
    """A resumed run with reordered clients is bit-identical, and blocks that no client trained do not change.

    The base optimizer changes the trained tensors, so it is not ignored.
    """
    changes = {**chosen, "base_optimizer": base, "local.steps": 2, "federation.depths": [2, 1, 3]}
    method = method_of(chosen["method"])
    if base["name"] == "feddyn" and isinstance(method, SeparateModels):
        with pytest.raises(
            UserError, match=f"feddyn corrects the mean of the clients' models, but `method` {method.name} does not"
        ):
            federation(changes)
        return
    if base["name"] == "feddyn" and isinstance(method, LoraRule) and not method.keeps_factors:
        with pytest.raises(UserError, match=f"cannot be combined with `method` {method.name}, which replaces A and B"):
            federation(changes)
        return
    given = federation(changes)
    start, first, second = federate(given)
    save(tmp_path / "checkpoint", Checkpoint(1, first.state, ()))
    fresh = federation(changes)
    read = load(tmp_path / "checkpoint", like=fresh.initial_state())
    assert identical(read.state, first.state)
    turned = replace(fresh, clients=list(reversed(fresh.clients)))
    assert identical_rounds([second], federate(turned, RoundResult(1, read.state)))

    rows = given.method.allocate(start.state, given.cohort(1), given.server, stream(given.seed, "allocation", 1))
    idle = set(range(12)) - {layer for row in rows.values() for layer in row.trained}
    if all(len(rows[client.id].held) == client.capacity for client in given.cohort(1)):
        assert len(idle) >= 12 - 2 - 1 - 3
    for tensor in (one for one in start.state.adapter if layer_of(one) in idle):
        assert torch.equal(first.state.adapter[tensor], start.state.adapter[tensor])
    plain = list(federate(federation({**changes, "base_optimizer": "fedavg"}), first))
    assert identical(trained(plain[-1].state), trained(second.state)) == (not start.state.adapter)


def trained(state: ServerState) -> ServerState:
    """Return the state without the memory of the base optimizer."""
    return replace(state, client_memory={}, server_memory={})


MIXER = {"name": "timm", "model": "mixer_s16_224", "pretrained": "none"}
MIXER |= {"img_size": 16, "patch_size": 4, "embed_dim": 24, "num_blocks": 12}


def test_the_method_runs_on_a_mixer(federation, chosen):
    """A mixer has linear layers of different shapes and, with an adapter on the patch embedding, a convolution.

    A method that folds changes into frozen weights supports only linear layers.
    """
    if "backbone" in chosen:
        pytest.skip("the method needs a text encoder")
    folds = getattr(method_of(chosen["method"]), "folds", False)
    changes = {**chosen, "backbone": MIXER, "lora.rank": 2, "lora.patch_embed": not folds}
    small = federation({**changes, "federation.depths": [4, 2, 3], "local.steps": 1})
    start, updates = one_round(small)
    shapes = {tuple(tensor.shape) for tensor in start.state.adapter.values()}
    convolution = set() if folds else {(2, 3, 4, 4)}
    assert {(2, 12), (16, 2), (2, 96), (24, 2)} | convolution <= shapes or not small.method.needs.lora
    trained = {None, *(layer for update in updates for layer in update.allocation.trained)}
    for rule in ("factors", "product_svd"):
        aggregation = small.server.aggregation.model_copy(update={"lora": rule})
        after = small.method.aggregate(start.state, updates, replace(small.server, aggregation=aggregation))
        given, kept = (
            SeparateModels.of_method(small.method).sent_adapter(state, small.clients[0].id)
            for state in (after, start.state)
        )
        private = {layer_of(one) for update in updates for one in update.private}
        assert {layer_of(one) for one in moved(kept, given)} | private == trained
    assert identical(one_round(small)[1], updates)


def test_the_method_runs_on_a_clip(federation, chosen, random_clip):
    """Blocks of both encoders are trained and averaged; a method that needs a head raises an error."""
    clip = {"backbone": {"name": "clip", "model": str(random_clip)}, "lora.position": "all", "lora.rank": 2}
    changes = {**chosen, **clip, "federation.depths": [4, 2, 3]}
    if method_of(chosen["method"]).needs.head:
        with pytest.raises(UserError, match=f"`method` {chosen['method']['name']} needs a `backbone` with a head"):
            federation(changes)
        return
    small = federation(changes)
    start, updates = one_round(small)
    after = small.method.aggregate(start.state, updates, small.server).adapter
    sent = {name for update in updates for name in update.adapter}
    changed = moved(start.state.adapter, after)  # a method may fold the product of the factors into W
    still = {name for name in sent if name not in changed and folded_name(name) not in changed}
    assert still <= {name for name in sent if "lora_A" in name}  # B = 0, so A has no gradient yet
    assert identical(one_round(small)[1], updates)
