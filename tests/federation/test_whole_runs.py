"""Runs of three rounds with partial cohorts in double precision, against independent references.

Every base optimizer and every method runs through `federate` with the real trainer. `tests/references/whole_runs.py`
repeats the whole run on its own functions; only the random draws and the untrained tensors are shared.
"""

from dataclasses import replace

import pytest
import torch

from fedsweep.common.randomness import stream
from fedsweep.federation.rounds import Federation, federate
from fedsweep.testing.compare import unkept
from fedsweep.types import RoundResult
from tests.references import whole_runs as reference
from tests.references.networks import cross_entropy
from tests.references.whole_runs import Party, World, vit_of

VIT = {"name": "timm", "model": "vit_tiny_patch16_224", "pretrained": "none"}
VIT |= {"img_size": 16, "patch_size": 8, "embed_dim": 12, "num_blocks": 4, "num_heads": 2}
COMMON = {
    "backbone": VIT,
    "lora.rank": 2,
    "lora.scaling": 1.5,
    "lora.dropout": 0.0,
    "federation.rounds": 3,
    "federation.clients_per_round": 2,
    "federation.depths": [4, 2, 1],
    "local.steps": 3,
    "optimizer": {"name": "sgd", "lr": 0.2, "momentum": 0.5, "weight_decay": 0.01, "clip_norm": 1.0},
    "seed": 2,
}
BASES = {"fedavg": {}, "fedprox": {"mu": 0.4}, "feddyn": {"alpha": 0.3}}


def doubled(federation: Federation) -> Federation:
    """Return the federation in double precision, with noise on every tensor so that each one matters."""
    model, generator = federation.model.double(), torch.Generator().manual_seed(3)
    for one in model.parameters():
        one.data.add_(0.1 * torch.randn(one.shape, generator=generator))
    return replace(unkept(federation), fresh=model.adapter())


def world_of(small: Federation, heads: int = 2, scaling: float = 1.5) -> World:
    """Return the constants of a federation's run for the reference."""
    trainer, base = small.trainer, small.trainer.base
    return World(
        net=vit_of(small.model, heads, scaling),
        frozen={name: one.detach().clone() for name, one in small.model.named_parameters() if not one.requires_grad},
        clients={
            one.id: Party(*one.train.take(torch.arange(len(one.train))), one.domain, one.capacity)
            for one in small.clients
        },
        draw=stream,
        per_round=small.config.clients_per_round,
        steps=trainer.local.steps,
        batch=trainer.local.batch_size,
        optimizer=trainer.optimizer.model_dump(),
        base=base.name,
        strength=getattr(base, "mu", getattr(base, "alpha", 0.0)),
        uniform=small.server.aggregation.weights == "uniform",
        rounds=small.config.rounds,
        seed=small.seed,
    )


def same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], rtol: float = 1e-8) -> None:
    assert set(ours) == set(theirs)
    for name, one in ours.items():
        torch.testing.assert_close(
            one, theirs[name], rtol=rtol, atol=rtol / 100, msg=lambda text, name=name: name + text
        )


def compare(
    small: Federation, played: reference.Averaging, rtol: float = 1e-8, by_domain: bool = False
) -> list[RoundResult]:
    """Run the federation and its reference, compare every round, and return the results of the rounds.

    If `by_domain` is true, the reference predicts with the part of its model that belongs to an image's domain.
    """
    start, *results = federate(small)
    same(start.state.adapter, played.fresh)
    for result, seen in zip(results, played.play(), strict=True):
        state = result.state
        same(state.adapter, seen.theta, rtol)
        assert set(state.client_memory) == set(seen.remembered)
        for client, remembered in state.client_memory.items():
            same(remembered, seen.remembered[client], rtol)
        same(state.server_memory, seen.server, rtol)
        assert result.metrics["loss/train"] == pytest.approx(seen.loss, rel=1e-5)
        tests = [one.test.take(torch.arange(len(one.test))) for one in small.domains]
        given = [{"domain": one.name} if by_domain else {} for one in small.domains]
        logits = [played.predict(seen.theta, test[0], **own) for test, own in zip(tests, given, strict=True)]
        losses = [float(cross_entropy(one, labels)) for one, (_, labels) in zip(logits, tests, strict=True)]
        hits = [
            float((one.argmax(1) == labels).double().mean()) for one, (_, labels) in zip(logits, tests, strict=True)
        ]
        assert result.metrics["loss/test"] == pytest.approx(sum(losses) / 3, rel=1e-6)
        assert result.metrics["accuracy/mean"] == pytest.approx(sum(hits) / 3, rel=1e-9)
    assert len(results) == 3
    cohorts = [one.id for round in (1, 2, 3) for one in small.cohort(round)]
    assert len(set(cohorts)) < len(cohorts)  # a client takes part again, and remembers its first round
    return results


METHODS = {
    "all_large": (reference.Averaging, {}),
    "all_small": (reference.AllSmall, {}),
    "fedra": (reference.FedRA, {}),
    "inclusivefl": (reference.InclusiveFL, {}),
    "depthfl": (reference.DepthFL, {"heads": [1, 2]}),
}
PAIRS = [("fedra", base) for base in BASES] + [(method, "feddyn") for method in METHODS if method != "fedra"]


@pytest.mark.parametrize(("method", "base"), PAIRS)
def test_depth_methods_with_every_base_optimizer(federation, method, base):
    kind, fields = METHODS[method]
    changes = {"method": {"name": method, **fields}, "base_optimizer": {"name": base, **BASES[base]}}
    small = doubled(federation({**COMMON, **changes}))
    compare(small, kind(world_of(small), small.fresh))


BRICKS = {"name": "fedbrick", "rank": 2, "server_epochs": 2, "server_lr": 0.01}
BRICKS |= {"lambda_w": 0.3, "lambda_theta": 0.2, "lambda_d": 0.7}


@pytest.mark.parametrize(
    ("over", "base", "norm"),
    [
        ("fedra", "fedavg", "sum"),
        ("fedra", "feddyn", "mean"),
        ("inclusivefl", "fedprox", "mean"),
        ("depthfl", "fedavg", "mean"),
    ],
)
def test_fedbrick_over_every_depth_method(federation, over, base, norm):
    """The reference sums the squared differences of each image if the norm is `sum` (Eq. 24 as printed)."""
    kind, fields = METHODS[over]
    method = {**BRICKS, "over": {"name": over, **fields}, "distillation_norm": norm}
    changes = {"method": method, "base_optimizer": {"name": base, **BASES[base]}, "partition.proxy_share": 0.2}
    small = doubled(federation({**COMMON, **changes}))
    proxy = {domain: images.take(torch.arange(len(images)))[0] for domain, images in small.server.proxy.items()}
    played = reference.FedBRICK(world_of(small), small.fresh, kind, proxy)
    played.norm = norm
    compare(small, played)


ADAM = {"name": "adam", "lr": 0.01, "betas": [0.8, 0.9], "eps": 1e-3, "weight_decay": 0.1, "clip_norm": 0.5}


@pytest.mark.parametrize("base", list(BASES))
def test_full_fine_tuning_with_adam_and_uniform_weights(federation, base):
    changes = {"method": "ft", "optimizer": ADAM, "base_optimizer": {"name": base, **BASES[base]}}
    small = doubled(federation({**COMMON, **changes, "aggregation.weights": "uniform"}))
    compare(small, reference.Averaging(world_of(small), small.fresh))


def test_full_fine_tuning_with_synthetic_images(federation):
    """The server's own training has neither a proximal term nor a remembered gradient."""
    changes = {"method": {"name": "ft", "synthetic_epochs": 1}, "base_optimizer": {"name": "fedprox", "mu": 0.4}}
    changes |= {"partition.proxy_share": 0.2, "synthetic": {"name": "surrogate", "share": 0.01}}
    small = doubled(federation({**COMMON, **changes}))
    played = reference.WithSynthetic(world_of(small), small.fresh)
    parts = [one.take(torch.arange(len(one))) for one in small.server.synthetic.values()]
    played.images = Party(*(torch.cat(each) for each in zip(*parts, strict=True)), "", 0)
    compare(small, played)


@pytest.mark.parametrize("base", ["fedavg", "feddyn"])
@pytest.mark.parametrize("method", [{"name": "lfft"}, {"name": "fedot", "bottom": 1, "top": 1}])
def test_methods_that_freeze_blocks(federation, method, base):
    small = doubled(federation({**COMMON, "method": method, "base_optimizer": {"name": base, **BASES[base]}}))
    kind = reference.FedOT if method["name"] == "fedot" else reference.Averaging
    compare(small, kind(world_of(small), small.fresh))
