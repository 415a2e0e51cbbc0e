"""Forward passes that several clients share, compared with one forward pass per client."""

from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from fedsweep.models import LoraConfig, add_lora
from fedsweep.models.cohort_pass import ClientPass, cohort_logits, joinable
from fedsweep.models.layered import LayeredModel
from fedsweep.models.lora_linear import NARROW
from fedsweep.models.names import names_within
from fedsweep.models.sessions import DropoutMasks, Segment
from fedsweep.types import Batch, ImageSet
from tests.models.test_walks import CASES, layered

WALKS = [(0, 1, 2), (0, 2), (2,), (1, 2)]


@cache
def images(count: int, seed: int) -> Tensor:
    return torch.randint(256, (count, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def adapted(name: str, rank: int = 3, dropout: float = 0.0) -> LayeredModel:
    """Return a small model in double precision, so that differences are faults and not rounding."""
    model = layered(name)
    add_lora(model, LoraConfig(rank=rank, scaling=0.7, position="both", dropout=dropout), seed=0)
    return model.double()


def states(model: LayeredModel) -> list[dict[str, Tensor]]:
    """Return random tensors for four clients, each with the tensors of the blocks that the client holds."""
    found = []
    for seed, walk in enumerate(WALKS):
        generator = torch.Generator().manual_seed(seed)
        names, start = names_within(model.trainable(), walk), model.adapter()
        noise = {name: torch.randn(start[name].shape, generator=generator, dtype=torch.float64) for name in names}
        found.append({name: (start[name] + 0.1 * noise[name]).requires_grad_() for name in names})
    return found


def logits_of(model: LayeredModel, given: list[dict[str, Tensor]], sizes: list[int], together: bool) -> list[Tensor]:
    """Return the logits of clients with the tensors `given`, from one pass or from one pass per client."""
    clients = list(enumerate(zip(sizes, WALKS, given, strict=True)))
    model.train()
    if together:
        return cohort_logits(
            model,
            [
                ClientPass(images(size, seed), walk, Segment(size, state, DropoutMasks(seed)))
                for seed, (size, walk, state) in clients
            ],
        )
    logits = []
    for seed, (size, walk, state) in clients:
        with model.session.drawing(DropoutMasks(seed)):
            logits.append(torch.func.functional_call(model, state, (images(size, seed), walk)))
    return logits


def gradients_of(logits: list[Tensor], given: list[dict[str, Tensor]]) -> list[Tensor]:
    loss = torch.stack([F.cross_entropy(one, torch.arange(len(one)) % 5) for one in logits]).sum()
    return list(torch.autograd.grad(loss, [one for state in given for one in state.values()]))


@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("sizes", [[3, 3, 3, 3], [3, 1, 2, 5]], ids=["equal", "unequal"])
@pytest.mark.parametrize("name", [name for name in CASES if "distilled" not in name])
def test_logits_and_gradients_are_those_of_one_pass_per_client(name, sizes, dropout):
    model = adapted(name, dropout=dropout)
    assert joinable(model, model.trainable())
    given = states(model)
    ours, theirs = (logits_of(model, given, sizes, together) for together in (True, False))
    found = zip([*ours, *gradients_of(ours, given)], [*theirs, *gradients_of(theirs, given)], strict=True)
    for one, other in found:
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)
    assert not model.session.segments


def test_wide_layers_join_clients_too(monkeypatch):
    """Layers that are too wide for a dense gradient take another order of products."""
    monkeypatch.setattr("fedsweep.models.lora_linear.NARROW", 1)
    assert NARROW > 1
    test_logits_and_gradients_are_those_of_one_pass_per_client("vit_tiny_patch16_224", [3, 3, 3, 3], 0.0)


def test_a_client_can_start_from_cached_tokens():
    model = adapted("vit_tiny_patch16_224")
    given = states(model)
    pixels = images(3, 0)
    with torch.no_grad():
        tokens = model.walk(pixels, (0,))
    cached = Batch(ImageSet(pixels, torch.zeros(3)), torch.arange(3), tokens, 1)
    last = {name: tensor for name, tensor in given[0].items() if ".blocks.0." not in name}
    passes = [
        ClientPass(cached, WALKS[0], Segment(3, last, DropoutMasks(0))),
        ClientPass(images(2, 1), WALKS[1], Segment(2, given[1], DropoutMasks(1))),
    ]
    ours = cohort_logits(model, passes)
    expected = [
        torch.func.functional_call(model, last, (pixels, WALKS[0])),
        torch.func.functional_call(model, given[1], (images(2, 1), WALKS[1])),
    ]
    for one, other in zip(ours, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("sizes", [[3, 3, 3, 3], [3, 1, 2, 5]], ids=["equal", "unequal"])
def test_a_shared_pass_does_no_work_for_blocks_that_a_client_does_not_hold(sizes):
    model = adapted("vit_tiny_patch16_224")
    given, forward, backward = states(model), [], []
    for together in (True, False):
        with FlopCounterMode(display=False) as counter:
            logits = logits_of(model, given, sizes, together)
        forward.append(counter.get_total_flops())
        with FlopCounterMode(display=False) as counter:
            gradients_of(logits, given)
        backward.append(counter.get_total_flops())
    assert forward[0] == forward[1]
    # Below the lowest trained tensor of a client, the gradient of the batch goes on for other clients.
    assert backward[1] <= backward[0] < 1.2 * backward[1]


def test_models_whose_other_tensors_depend_on_the_client_are_not_joined():
    distilled = adapted("deit_tiny_distilled_patch16_224")
    assert not joinable(distilled, distilled.trainable())
    model = layered("vit_tiny_patch16_224")
    add_lora(model, LoraConfig(rank=3, scaling=0.7, patch_embed=True), seed=0)
    assert not joinable(model, model.trainable())
    assert joinable(model, names_within(model.trainable(), (0,), ("backbone.patch_embed.",)))
