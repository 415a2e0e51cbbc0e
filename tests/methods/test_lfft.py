"""Properties of LFFT."""

import pytest

from fedsweep.common.errors import UserError
from fedsweep.federation.build_and_run import build
from fedsweep.federation.rounds import federate
from fedsweep.models.names import layer_of
from fedsweep.testing.compare import identical, identical_rounds, moved
from fedsweep.testing.rounds import one_round


@pytest.mark.parametrize(("frozen", "first"), [(0.5, 6), (0.25, 3), (0.9, 11), (0.0, 0)])
def test_only_the_upper_blocks_and_the_layers_above_change(federation, frozen, first):
    start, updates = one_round(federation({"method": {"name": "lfft", "frozen": frozen}}))
    for update in updates:
        now = {**start.state.adapter, **update.adapter}
        assert {layer_of(name) for name in moved(start.state.adapter, now)} == {None, *range(first, 12)}
        assert all(
            name.startswith(("backbone.norm", "backbone.head")) for name in update.adapter if layer_of(name) is None
        )


def test_training_on_known_images_does_not_run_the_frozen_blocks(federation, tmp_path, monkeypatch):
    monkeypatch.setenv("FEDSWEEP_CACHE", str(tmp_path))
    small = {"data.domains": ["plain"], "federation.depths": [12], "federation.rounds": 2, "local.steps": "epoch"}
    built = federation({"method": "lfft", **small}, train=100, test=50)
    seen: dict[int, int] = dict.fromkeys(range(12), 0)
    for place, block in enumerate(built.model.backbone.blocks):
        block.register_forward_hook(
            lambda module, inputs, out, place=place: seen.update({place: seen[place] + len(out)})
        )
    list(federate(built))
    train, test = len(built.clients[0].train), len(built.domains[0].test)
    assert {seen[place] for place in range(6, 12)} == {2 * train + 3 * test}
    assert train + test <= seen[0] <= train + test + 15 * (train // built.trainer.local.batch_size + 3)
    assert len({seen[place] for place in range(6)}) == 1


def test_freezing_all_blocks_is_rejected(tiny):
    with pytest.raises(UserError, match=r"`method\.frozen` must leave at least one of 12 blocks to train, but it is 1"):
        tiny.override({"method": {"name": "lfft", "frozen": 1.0}}, "test")


def test_on_a_clip_both_encoders_have_the_same_blocks(federation, random_clip):
    clip = {"backbone": {"name": "clip", "model": str(random_clip)}, "lora.position": "mlp"}
    start, (update, *_) = one_round(federation({"method": "lfft", **clip}))
    towers = {(layer_of(name), name.split(".")[3]) for name in update.adapter if layer_of(name) is not None}
    assert {layer for layer, _ in towers} == set(range(6, 12))
    assert {tower for _, tower in towers} == {"vision", "text"}
    assert "backbone.logit_scale" in update.adapter
    assert not [name for name in start.state.adapter if name.startswith(("backbone.stem", "backbone.words"))]
    assert identical(one_round(federation({"method": "lfft", **clip}))[1][0], update)


def test_seeds_with_untrained_backbones_do_not_share_cached_outputs(experiment, tmp_path, monkeypatch):
    """Each seed draws its own backbone, so the cached outputs of one backbone are wrong for another."""
    fresh = {"name": "timm", "model": "vit_tiny_patch16_224", "pretrained": "none", "img_size": 16, "patch_size": 4}
    fresh |= {"embed_dim": 16, "num_blocks": 4, "num_heads": 2}
    small = {"data.domains": ["plain"], "federation.depths": [4], "federation.rounds": 1, "local.steps": 2}
    config = experiment.override({"method": "lfft", "backbone": fresh, **small}, "test")
    monkeypatch.setenv("FEDSWEEP_CACHE_GB", "0")
    alone = [list(federate(build(config.override({"seed": seed}, "test")))) for seed in (0, 1)]
    monkeypatch.setenv("FEDSWEEP_CACHE_GB", "1")
    monkeypatch.setenv("FEDSWEEP_CACHE", str(tmp_path))
    kept = [list(federate(build(config.override({"seed": seed}, "test")))) for seed in (0, 1, 0)]
    assert list(tmp_path.iterdir())
    for one, other in zip([*alone, alone[0]], kept, strict=True):
        assert identical_rounds(one, other)
