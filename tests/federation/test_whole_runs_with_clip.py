"""Runs of three rounds of the methods on CLIP in double precision, against independent references."""

from pathlib import Path

import pytest
import torch

from fedsweep.federation.rounds import Federation
from fedsweep.types import ImageSet
from tests.federation.test_whole_runs import BASES, COMMON, compare, doubled, world_of
from tests.models.clips import network, write
from tests.references import whole_runs_with_clip as reference
from tests.references.networks import Clip
from tests.references.whole_runs import Party, World


@pytest.fixture(scope="session")
def small_clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a CLIP checkpoint with three blocks in both encoders, and return its folder."""
    return write(tmp_path_factory.mktemp("small_clip"), network(3, 3))


def clip_of(model, root: str = "") -> Clip:
    return Clip(2, model.num_layers, model.mean, model.std, model.prompts, model.ends, 1.5, root)


def on_clip(small: Federation) -> World:
    world = world_of(small)
    world.net = clip_of(small.model)
    return world


def party(images: ImageSet) -> Party:
    return Party(*images.take(torch.arange(len(images))), "", 0)


@pytest.fixture
def clip_run(small_clip: Path) -> dict:
    """Return the changes that put a run on the small CLIP."""
    return {**COMMON, "backbone": {"name": "clip", "model": str(small_clip)}, "federation.depths": [3]}


@pytest.mark.parametrize(
    ("method", "base"),
    [
        ({"name": "fedclip", "hidden": 5}, "feddyn"),
        ({"name": "promptfl", "context": 3}, "feddyn"),
        ({"name": "zero_shot"}, "fedavg"),
        ({"name": "all_large"}, "fedprox"),
        ({"name": "ft"}, "fedavg"),
    ],
)
def test_methods_that_average_on_clip(federation, clip_run, method, base):
    changes = {"method": method, "base_optimizer": {"name": base, **BASES[base]}, "lora.position": "all"}
    small = doubled(federation({**clip_run, **changes}))
    kind = reference.ZeroShot if method["name"] == "zero_shot" else reference.Frozen
    compare(small, kind(on_clip(small), small.fresh))


@pytest.mark.parametrize(("base", "weights"), [("fedavg", "loss"), ("feddyn", "aggregation")])
def test_fedms(federation, clip_run, base, weights):
    """Round 1 trains the global expert; rounds 2 and 3 train local experts, with a stall after every round."""
    gate = {"trunk": {"name": "digits_resnet"}, "hidden": 4, "weights": weights}
    method = {"name": "fedms", "global_rounds": 1, "sal": {"queue": 1, "threshold": 0.9}, "gate": gate}
    shares = {f"partition.{use}_share": 0.05 for use in ("validation", "test", "tuning")}
    changes = {"method": method, "base_optimizer": {"name": base, **BASES[base]}, "lora.position": "mlp"}
    small = doubled(federation({**clip_run, **shares, **changes}))
    played = reference.FedMS(
        on_clip(small), small.fresh, small.model.gate.features, {one.id: party(one.validation) for one in small.clients}
    )
    played.by_loss = weights == "loss"
    results = compare(small, played, rtol=1e-6)
    last = results[-1]
    assert last.state.active == played.active
    assert max(played.active.values()) == 2
    for one in small.clients:
        for start, images in (("", one.test), ("validation/", one.tuning)):
            expected = played.own_accuracy(last.state.adapter, one.id, party(images))
            assert last.metrics[f"{start}accuracy/client/{one.id}"] == pytest.approx(expected)


@pytest.mark.parametrize(("update", "base"), [("joint", "fedprox"), ("alternating", "fedavg")])
def test_fedag(federation, small_clip, update, base):
    server = {"warmup_epochs": 2, "epochs": 2, "batch_size": 8, "lr": 0.01, "update": update}
    clip = {"name": "clip", "model": str(small_clip), "prompt": "a photo of a {}"}
    method = {"name": "fedag", "clip": clip, "server": server, "adapters": {"hidden": 6, "attention": 5}}
    changes = {"method": method, "base_optimizer": {"name": base, **BASES[base]}, "partition.proxy_share": 0.2}
    changes |= {"synthetic": {"name": "surrogate", "share": 0.01}, "federation.depths": [4]}
    changes |= {"data.domains": ["plain", "inverted", "noisy", "thick"], "data.held_out_domains": ["thick"]}
    small = doubled(federation({**COMMON, **changes}))
    adapters = small.model.server
    adapters.text = adapters.clip.text_features(range(3)).detach().clone()
    adapters.scale = adapters.clip.backbone.logit_scale.exp().detach().clone()
    synthetic = {domain: party(images) for domain, images in small.server.synthetic.items()}
    played = reference.FedAG(world_of(small), small.fresh, clip_of(adapters.clip, "server.clip."), synthetic)
    played.joint = update == "joint"
    results = compare(small, played, by_domain=True)
    (other,) = small.held_out
    images = party(other.test)
    found = played.predict(results[-1].state.adapter, images.images).argmax(1) == images.labels
    assert results[-1].metrics["accuracy/out_of_domain_mean"] == pytest.approx(float(found.double().mean()))
