"""Rounds of every method on a pretended GPU: all tensors are on the right device, and no local step waits."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedsweep.federation.rounds import Federation, federate
from fedsweep.models.resident_images import ResidentImages
from fedsweep.testing.compare import tensors_in, unkept
from fedsweep.training import local_training
from fedsweep.training.local_training import CohortTrainer
from fedsweep.types import RoundListener, RoundResult
from tests.pretended_gpu import GPU, DeviceTensor, PretendedGPU

SHALLOW = {"name": "timm", "model": "vit_tiny_patch16_224", "pretrained": "none", "img_size": 16, "patch_size": 4}
SHALLOW |= {"embed_dim": 24, "num_heads": 2, "num_blocks": 6}
SMALL = {
    "local.steps": 2,
    "federation.rounds": 1,
    "federation.depths": [3, 1],
    "data.domains": ["plain", "noisy"],
    "backbone": SHALLOW,
    "lora.rank": 2,
}
HEADS = {"depthfl": {"method.heads": [2]}, "fedbrick over depthfl": {"method.over.heads": [2]}}


class Steps(RoundListener):
    """A listener that counts local steps and collects the operations in them for which the host waits.

    A step begins when the step before it ends, or when the preparation of the session ends.
    """

    def __init__(self, gpu: PretendedGPU) -> None:
        self.gpu, self.seen, self.steps, self.waits = gpu, 0, 0, list[str]()

    def prepared(self) -> None:
        """Leave out the operations of the preparation."""
        self.seen = len(self.gpu.waits)

    def training(self, done: float, clients: int) -> None:
        """Collect the operations since the preceding step."""
        self.steps += 1
        self.waits += self.gpu.waits[self.seen :]
        self.seen = len(self.gpu.waits)


def on(gpu: PretendedGPU, federation: Federation) -> Federation:
    """Return a copy of a federation whose model is on the pretended GPU, with the images of the first domain."""
    federation.model.to(GPU)
    resident = ResidentImages(GPU, federation.domains[0].train.parts[0].nbytes)
    reader = replace(federation.trainer.reader, listener=Steps(gpu), resident=resident)
    return replace(
        federation,
        fresh={name: one.to(GPU) for name, one in federation.fresh.items()},
        trainer=replace(federation.trainer, reader=reader),
    )


def played(federation: Federation) -> tuple[list[RoundResult], Steps]:
    """Run a federation on the pretended GPU; return its rounds and the local steps."""
    with PretendedGPU() as gpu, pytest.MonkeyPatch.context() as patch:
        there = on(gpu, federation)
        steps, prepare = there.trainer.reader.listener, CohortTrainer._session

        def prepared(*given: Any) -> Any:
            session = prepare(*given)
            steps.prepared()
            return session

        patch.setattr(CohortTrainer, "_session", prepared)
        return list(federate(there)), steps


MEASURED = ("fedra", "fedbrick over depthfl")
"""The methods whose client drift and structural bias are measured; the second one has stand-ins for missing blocks."""


def check(small: Federation) -> None:
    """Assert that a run on the pretended GPU has the metrics of a run on the CPU, and that no local step waits."""
    expected = list(federate(small))
    rounds, steps = played(small)
    assert len(rounds) == len(expected) == 2
    for found, known in zip(rounds, expected, strict=True):
        assert found.metrics == pytest.approx(known.metrics, rel=1e-2, abs=1e-5)
        assert all(isinstance(one, DeviceTensor) for one in tensors_in(found.state.adapter))
    assert steps.steps >= len(small.cohort(1)) or not small.fresh
    assert steps.waits == []


def test_a_round_of_the_method(federation, chosen, name):
    measured = {"evaluation.metrics": ["drift", "structural_bias"]} if name in MEASURED else {}
    changes = {**SMALL, **chosen, **HEADS.get(name, {}), **measured}
    check(unkept(federation(changes, train=16, test=4)))


@pytest.mark.parametrize(
    "changes",
    [
        {"base_optimizer": {"name": "feddyn", "alpha": 0.1}, "local.steps": 3},
        {"base_optimizer": {"name": "fedprox", "mu": 0.1}, "optimizer": {"name": "adam"}},
        {"aggregation.lora": "product_svd", "federation.malicious_share": 0.5},
        {"aggregation.lora": "freeze_a", "lora.dropout": 0.2, "lora.patch_embed": True},
    ],
    ids=["feddyn", "fedprox and adam", "product_svd and an attack", "freeze_a and dropout"],
)
def test_a_round_with_other_options(federation, changes):
    check(unkept(federation({**SMALL, **changes}, train=16, test=4)))


def test_a_round_that_fills_the_activation_cache(federation):
    changes = {**SMALL, "federation.depths": [6, 6], "method": {"name": "all_large"}, "lora.position": "l1"}
    small = federation(changes, train=16, test=4)
    assert small.trainer.reader.kept.folder is not None
    expected = list(federate(unkept(small)))
    rounds, _ = played(small)
    assert rounds[-1].metrics == pytest.approx(expected[-1].metrics, rel=1e-2, abs=1e-5)


def leave_a_parameter(patch: pytest.MonkeyPatch, small: Federation) -> None:
    patch.setattr(small.model.backbone.blocks[0].norm1, "weight", nn.Parameter(torch.ones(24)))


def leave_a_buffer(patch: pytest.MonkeyPatch, small: Federation) -> None:
    patch.setattr(small.model, "std", torch.ones(3, 1, 1))


def leave_the_labels(patch: pytest.MonkeyPatch, small: Federation) -> None:
    true = Tensor.to
    patch.setattr(
        Tensor, "to", lambda one, *given, **options: one if one.dtype == torch.int64 else true(one, *given, **options)
    )


@pytest.mark.parametrize("leave", [leave_a_parameter, leave_a_buffer, leave_the_labels])
def test_a_tensor_left_on_the_cpu_is_an_error(federation, monkeypatch, leave):
    small = unkept(federation(SMALL, train=16, test=4))
    with PretendedGPU() as gpu:
        there = on(gpu, small)
        leave(monkeypatch, there)
        with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
            list(federate(there))


WAITS = {
    "item": lambda one: one.sum().item(),
    "bool": lambda one: bool(one.sum() > 0),
    "tolist": lambda one: one.tolist(),
    "cpu": lambda one: one.cpu(),
    "nonzero": lambda one: one.nonzero(),
    "a mask": lambda one: one[one > 0],
    "equal": lambda one: torch.equal(one, one),
    "copy_": lambda one: torch.empty(3).copy_(one),
    "upload": lambda one: torch.ones(3).to(one.device),
}
"""Functions of a vector on the GPU for which CUDA makes the host wait."""


@pytest.mark.parametrize("wait", WAITS.values(), ids=WAITS)
def test_a_wait_is_recorded(wait):
    with PretendedGPU() as gpu:
        vector = torch.arange(3.0, device=GPU)
        assert (vector + 1).sqrt()[1:].device == GPU
        torch.ones(3).to(GPU, non_blocking=True)
        assert gpu.waits == []
        wait(vector)
    assert len(gpu.waits) == 1


@pytest.mark.parametrize("together", [True, False])
def test_a_wait_in_a_local_step_is_seen(federation, monkeypatch, together):
    small = unkept(federation(SMALL, train=16, test=4))
    if not together:
        monkeypatch.setattr(local_training, "JOINED_ON_GPU", 1)
    block = type(small.model).block

    def waiting(model, layer, tokens):
        out = block(model, layer, tokens)
        return out * out.isfinite().all().item() if torch.is_grad_enabled() else out

    monkeypatch.setattr(type(small.model), "block", waiting)
    _, steps = played(small)
    assert steps.steps == (2 if together else 4)
    assert set(steps.waits) == {"aten._local_scalar_dense"}
