"""The weight cache of a process, which reads weights once and gives every trial its own copy."""

from pathlib import Path

import pytest
import torch
from torch import nn

from fedsweep.common.errors import UserError
from fedsweep.methods.fedag.domain_adapters import AdaptersConfig, build_domain_adapters
from fedsweep.methods.fedms.gate import build_gate
from fedsweep.methods.fedms.trunk import DigitsTrunk, TimmTrunk
from fedsweep.models import LayeredModel, LoraConfig, build_model, lora, weights_file
from fedsweep.models import weight_cache as kept
from fedsweep.models.clip import backbone as clip_backbone
from fedsweep.models.clip.backbone import DigitsClip
from fedsweep.models.lora_linear import LoraLinear, SessionDropout
from fedsweep.models.timm.digits_vit import DigitsViT
from fedsweep.testing.compare import identical
from tests.models.small import tiny_vit

LORA = LoraConfig(rank=2, alpha=4)


@pytest.fixture(autouse=True)
def keeping(monkeypatch: pytest.MonkeyPatch) -> None:
    """Switch the cache on and empty it, as in a worker that has just started."""
    monkeypatch.setattr(kept, "_kept", None)
    kept.keep()


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Return a list to which every later read of a weights file appends its path."""
    seen, plain = [], weights_file.read

    def read(path: Path) -> dict[str, torch.Tensor]:
        seen.append(path)
        return plain(path)

    monkeypatch.setattr(weights_file, "read", read)
    return seen


def tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors of a model's backbone, without adapters."""
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name.replace(".base_layer", ""): one.detach() for name, one in named.items() if ".lora_" not in name}


def ruin(model: nn.Module) -> None:
    """Set every tensor of a model to 7 in place, to show that other models share no tensor with it."""
    with torch.no_grad():
        for one in (*model.parameters(), *model.buffers()):
            one.fill_(7)


def test_trials_with_different_seeds_and_ranks_read_a_file_once(weights, reads):
    backbone = tiny_vit(weights())
    for seed in (0, 1, 2):
        for rank in (1, 2):
            ruin(build_model(backbone, LoraConfig(rank=rank, alpha=4), 5, seed))
    assert len(reads) == 1


def test_nothing_is_cached_in_a_process_with_a_single_run(weights, reads, monkeypatch):
    monkeypatch.setattr(kept, "_kept", None)
    for _ in range(2):
        build_model(tiny_vit(weights()), LORA, 5, seed=0)
    assert len(reads) == 2
    assert kept._kept is None


def test_one_network_per_role_is_cached_and_none_without_weights(weights, reads):
    first, second = tiny_vit(weights("a.safetensors")), tiny_vit(weights("b.safetensors"))
    for backbone in (first, tiny_vit(), first, second, tiny_vit(), second, first):
        build_model(backbone, LORA, 5, seed=0)
    assert [path.stem for path in reads] == ["a", "b", "a"]
    assert len(kept._kept) == 1


def test_a_replaced_file_is_read_again(weights, reads):
    path = weights()
    backbone = tiny_vit(path)
    build_model(backbone, LORA, 5, seed=0)
    changed = weights(path.name, change=lambda state: {name: tensor + 1 for name, tensor in state.items()})
    assert changed == path
    again = build_model(backbone, None, 5, seed=0)
    assert reads == [path] * 2
    assert identical(tensors(again), tensors(backbone.build(5, seed=0)))


@pytest.mark.parametrize("classes", [5, 7])
@pytest.mark.parametrize("pretrained", [True, False])
def test_each_seed_gets_the_same_model_as_without_the_cache(weights, classes, pretrained):
    """Random tensors depend only on the seed, whether or not the other tensors are pretrained."""
    backbone = tiny_vit(weights(classes=5)) if pretrained else tiny_vit()
    for seed in (3, 0, 3, 1):
        model = build_model(backbone, None, classes, seed)
        assert identical(tensors(model), tensors(backbone.build(classes, seed)))
        assert model.head_is_fresh == (not pretrained or classes == 7)
        ruin(model)


def test_class_names_decide_whether_a_head_is_kept(weights):
    backbone = tiny_vit(weights(card={"class_names": list("abcde")}))
    for names in ("abcde", "edcba", "abcde"):
        model = build_model(backbone, None, 5, 0, names)
        assert identical(tensors(model), tensors(backbone.build(5, 0, names)))
        assert model.head_is_fresh == (names == "edcba")


@pytest.mark.parametrize("backbone", [DigitsViT(), DigitsClip()], ids=lambda one: one.name)
def test_each_trial_has_its_own_copy_of_an_included_backbone(backbone):
    expected = tensors(backbone.build(10, 0))
    for _ in range(2):
        model = build_model(backbone, None, 10, 0)
        assert identical(tensors(model), expected)
        ruin(model)


@pytest.mark.parametrize("trunk", [DigitsTrunk(), TimmTrunk(model="test_resnet", pretrained="none")])
def test_each_trial_has_its_own_copy_of_a_gates_trunk(trunk):
    for seed in (0, 1, 0):
        gate = build_gate(trunk, None, whole=True, seed=seed)
        assert identical(tensors(gate.trunk), tensors(trunk.build(seed)[0]))
        ruin(gate)


def test_caching_a_trunk_does_not_remove_the_backbone(weights, reads):
    backbone = tiny_vit(weights())
    for seed in (0, 1):
        build_model(backbone, LORA, 5, seed)
        build_gate(DigitsTrunk(), None, whole=False, seed=seed)
    assert len(reads) == 2  # the files of the backbone and the trunk, each read once


def test_broken_weights_are_an_error_each_time(weights):
    backbone = tiny_vit(weights(change=lambda state: {**state, "more": torch.zeros(1)}))
    for _ in range(2):
        with pytest.raises(UserError, match="the file has `more`, but the model does not"):
            build_model(backbone, LORA, 5, 0)


def test_each_trial_has_its_own_copy_of_the_servers_clip_which_is_read_once(monkeypatch):
    """In FedAG, the server's CLIP is a second backbone besides the one that the clients train."""
    config, names = DigitsClip(), tuple("0123456789")
    expected, loads, load = tensors(config.build(10, class_names=names)), [], clip_backbone.load
    monkeypatch.setattr(clip_backbone, "load", lambda *given: loads.append(given) or load(*given))
    for seed in (0, 1):
        build_model(DigitsViT(), LORA, 10, seed, names)
        server = build_domain_adapters(config, AdaptersConfig(), ["plain"], names, seed)
        assert identical(tensors(server.clip), expected)
        ruin(server)
    assert len(loads) == 1


@pytest.mark.parametrize("change", [{}, {"freeze_a": True}, {"patch_embed": True}], ids=str)
@pytest.mark.parametrize("backbone", [DigitsViT(), DigitsClip()], ids=lambda one: one.name)
def test_adapters_are_inserted_once_per_configuration_and_each_trial_gets_the_same_model_as_without_the_cache(
    backbone, change, monkeypatch
):
    inserted, insert = [], lora.Adapters.__call__
    monkeypatch.setattr(lora.Adapters, "__call__", lambda self, model: inserted.append(self) or insert(self, model))

    def model_of(rank: int, seed: int) -> LayeredModel:
        config = LoraConfig(rank=rank, alpha=4, patch_embed="patch_embed" in change) if rank else None
        return build_model(backbone, config, 10, seed, freeze_a="freeze_a" in change)

    trials = [(rank, seed) for seed in (0, 1) for rank in (2, 0, 5)]  # rank 0 stands for no adapters
    cached = {trial: model_of(*trial) for trial in trials}
    assert [one.config.rank for one in inserted] == [2, 5]
    monkeypatch.setattr(kept, "_kept", None)
    for trial, model in cached.items():
        plain = model_of(*trial)
        assert identical(dict(model.named_parameters()), dict(plain.named_parameters()))
        assert identical(dict(model.named_buffers()), dict(plain.named_buffers()))
        assert set(model.trainable()) == set(plain.trainable())
        sessions = {id(one.session) for one in model.modules() if isinstance(one, LoraLinear | SessionDropout)}
        assert sessions <= {id(model.session)}  # each layer reads the session of its own model
        assert bool(sessions) == bool(trial[0])
    parameters = [one for model in cached.values() for one in (*model.parameters(), *model.buffers())]
    assert len({one.data_ptr() for one in parameters if one.numel()}) == len(parameters)


def test_the_cache_keeps_the_forms_of_a_network_that_were_used_last(monkeypatch):
    monkeypatch.setattr(kept, "MOST_CHANGED", 2)
    for rank in (1, 2, 1, 3):
        build_model(DigitsViT(), LoraConfig(rank=rank, alpha=4), 10, 0)
    assert [one.config.rank for one in kept._kept["backbone"].changed] == [1, 3]


def test_a_form_with_adapters_shares_the_memory_of_the_frozen_weights():
    build_model(DigitsViT(), LORA, 10, 0)
    cached = kept._kept["backbone"]
    (form,) = cached.changed.values()
    plain, changed = ({tensor.data_ptr() for tensor in one._tensors.values()} for one in (cached.plain, form))
    assert plain < changed


def test_tensors_that_share_memory_share_it_in_a_copy_too():
    network = nn.Module()
    whole = torch.arange(8.0)
    network.register_buffer("whole", whole)
    network.register_buffer("part", whole[:4])
    copied = kept.Mould(network).cast()
    copied.whole.fill_(1)
    assert torch.equal(copied.part, torch.ones(4))
    assert torch.equal(whole, torch.arange(8.0))
