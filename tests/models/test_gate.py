"""FedMS's gate, its parameter counts, its output (tests/references/gate.py) and its trunks, which are ResNets."""

from functools import cache
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from huggingface_hub import constants
from safetensors.torch import save_file
from torch import Tensor, nn

from fedsweep.common.errors import UserError
from fedsweep.methods.fedms.gate import Gate, build_gate
from fedsweep.methods.fedms.trunk import WEIGHTS, DigitsTrunk, TimmTrunk
from fedsweep.models import weights_file
from fedsweep.testing.compare import identical, memory
from tests.models.small import stirred
from tests.references import gate as reference

SMALL = TimmTrunk(model="test_resnet", pretrained="none")  # a very small model of timm with features of width 96


def noise(count: int, size: int = 32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count, 3, size, size), dtype=torch.uint8, generator=generator)


def rows(count: int, seed: int, width: int = 64) -> Tensor:
    return 3 * torch.randn(count, width, generator=torch.Generator().manual_seed(seed)) + 1


def shaken(gate: Gate) -> Gate:
    """Add noise to every parameter of the gate's adapter, and return the gate."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in gate.adapter.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return gate


def buffers(module: nn.Module) -> dict[str, Tensor]:
    return {name: one.clone() for name, one in module.named_buffers() if name.endswith(("_mean", "_var"))}


def test_counts_are_those_of_table_4():
    gate = build_gate(TimmTrunk(model="resnet18.tv_in1k"), None, whole=False, seed=0, outlined=True)
    counts = {part: sum(one.numel() for one in module.parameters()) for part, module in gate.named_children()}
    assert counts == {"trunk": 11_176_512, "adapter": 264_195}
    assert sum(counts.values()) == 11_440_707
    assert {one.device.type for one in (*gate.parameters(), *gate.buffers())} == {"meta"}


@pytest.mark.usefixtures("untouchable_gpu")
@pytest.mark.parametrize("trunk", [DigitsTrunk(), SMALL], ids=lambda trunk: trunk.name)
def test_a_gate_is_built_without_a_gpu(trunk):
    built = build_gate(trunk, None, whole=False, seed=0)
    assert {one.device.type for one in (*built.parameters(), *built.buffers())} == {"cpu"}


@pytest.mark.parametrize(("hidden", "width"), [(None, 64), (7, 7)])
def test_the_hidden_width_is_the_given_one_or_that_of_the_trunk(hidden, width):
    gate = build_gate(DigitsTrunk(), hidden, whole=False, seed=0)
    assert [tuple(one.shape) for one in gate.adapter[0].parameters()] == [(width, 64), (width,)]
    assert [tuple(one.shape) for one in gate.adapter[2].parameters()] == [(1, width), (1,)]
    assert gate(gate.features(noise(3, 16))).shape == (3,)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("trunk", [DigitsTrunk(), SMALL], ids=lambda trunk: trunk.name)
def test_lambda_is_between_zero_and_one_and_differs_between_images(trunk, training):
    """The gate has a single output, so the softmax of the paper would give 1 for every image."""
    gate = build_gate(trunk, None, whole=False, seed=0).train(training)
    with torch.no_grad():
        mix = gate(gate.features(noise(12, 32)))
    assert mix.shape == (12,)
    assert mix.min() > 0
    assert mix.max() < 1
    assert mix.std() > 1e-4  # a thousand times the rounding error


def test_the_gate_is_a_sigmoid_of_two_normalised_linear_layers():
    gate = shaken(build_gate(DigitsTrunk(), 9, whole=False, seed=0)).train()
    norms = gate.adapter[1], gate.adapter[3]
    theirs = reference.Gate({name: one.detach().numpy() for name, one in gate.adapter.named_parameters()})
    for step, (count, training) in enumerate([(6, True), (2, True), (1, True), (5, False), (1, False), (4, True)]):
        features = rows(count, seed=step)
        with torch.no_grad():
            got = gate.train(training)(features)
        np.testing.assert_allclose(got.numpy(), theirs(features.numpy(), training), rtol=1e-4, atol=1e-5)
        for norm, expected in zip(norms, theirs.norms, strict=True):
            for moment, value in zip((norm.running_mean, norm.running_var), expected.moments, strict=True):
                np.testing.assert_allclose(moment.numpy(), value, rtol=1e-5, atol=1e-6)
    assert not np.allclose(theirs.norms[0].moments[1], 1, atol=0.1)


def test_training_equals_torchs_batch_norm():
    gate = shaken(build_gate(DigitsTrunk(), 9, whole=False, seed=0)).train()
    theirs = nn.Sequential(nn.Linear(64, 9), nn.BatchNorm1d(9), nn.Linear(9, 1), nn.BatchNorm1d(1)).train()
    theirs.load_state_dict(gate.adapter.state_dict())
    for step in range(3):
        features = rows(5, seed=step)
        ours, expected = gate(features), theirs(features).squeeze(1).sigmoid()
        torch.testing.assert_close(ours, expected)
        gradients = [
            torch.autograd.grad(out.square().sum(), list(net.parameters()))
            for out, net in ((ours, gate.adapter), (expected, theirs))
        ]
        torch.testing.assert_close(*gradients)
    assert identical(buffers(gate.adapter), buffers(theirs))


def test_a_single_image_uses_the_running_statistics_and_does_not_change_them():
    gate = shaken(build_gate(DigitsTrunk(), 9, whole=False, seed=0)).train()
    gate(rows(6, seed=1))
    before, one = buffers(gate), rows(1, seed=2)
    learnt = gate(one)
    gradients = torch.autograd.grad(learnt.sum(), list(gate.adapter.parameters()))
    assert len(gradients) == 8
    assert all(one.isfinite().all() and one.any() for one in gradients)
    assert identical(buffers(gate), before)
    assert torch.equal(learnt, gate.eval()(one))


@pytest.mark.parametrize("whole", [False, True])
def test_a_trunks_statistics_and_gradients_change_only_if_it_is_trained(whole):
    gate = build_gate(SMALL, 8, whole=whole, seed=0)
    assert not any(module.training for module in gate.modules())
    before = buffers(gate)
    gate.train()
    assert gate.adapter.training
    assert gate.trunk.training == whole
    mix = gate(gate.features(noise(6)))
    after = buffers(gate)
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    of_trunk = {name for name in before if name.startswith("trunk.")}
    assert len(of_trunk) > 20
    assert moved == (set(before) if whole else set(before) - of_trunk)
    trained = {name for name, one in gate.named_parameters() if one.requires_grad}
    assert {name.split(".")[0] for name in trained} == ({"trunk", "adapter"} if whole else {"adapter"})
    torch.autograd.backward(mix.sum())
    assert {name for name, one in gate.named_parameters() if one.grad is not None} == trained
    assert len(trained) > 20 if whole else len(trained) == 8


@pytest.mark.parametrize(
    ("trunk", "size"), [(SMALL, 64), (DigitsTrunk(), 16)]
)  # sizes at which the last feature maps are one pixel
def test_a_single_image_trains_a_whole_gate_without_changing_its_statistics(trunk, size):
    gate = build_gate(trunk, None, whole=True, seed=0).train()
    gate(gate.features(noise(5, size)))
    before, one = buffers(gate), noise(1, size, seed=1)
    mix = gate(gate.features(one))
    assert identical(buffers(gate), before)
    assert all(module.training for module in gate.modules())
    gradients = torch.autograd.grad(mix.sum(), list(gate.parameters()))
    assert sum(bool(one.any()) for one in gradients) > 20
    torch.testing.assert_close(mix, gate.eval()(gate.features(one)))


def test_a_gate_depends_on_its_seed_and_does_not_use_the_global_generator():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        first, after = build_gate(SMALL, None, whole=False, seed=0), torch.rand(4)
        torch.manual_seed(1)
        assert torch.equal(after, torch.rand(4))
        again, other = build_gate(SMALL, None, whole=False, seed=0), build_gate(SMALL, None, whole=False, seed=1)
    assert identical(dict(first.state_dict()), dict(again.state_dict()))
    assert not memory(list(first.parameters())) & memory(list(again.parameters()))
    drawn = [name for name, one in first.named_parameters() if one.ndim > 1]
    assert len(drawn) > 10
    assert not any(torch.equal(first.state_dict()[name], other.state_dict()[name]) for name in drawn)
    assert first.identity == again.identity != other.identity


def test_an_untrained_adapter_is_kaiming_uniform_with_zero_biases_for_every_trunk():
    gates = [build_gate(trunk, 32, whole=False, seed=3) for trunk in (SMALL, DigitsTrunk())]
    for gate in gates:
        for layer in (gate.adapter[0], gate.adapter[2]):
            bound = layer.in_features**-0.5  # the bound for a = sqrt(5)
            assert 0.85 * bound < layer.weight.abs().max() <= bound
            assert not layer.bias.any()
        for norm in (gate.adapter[1], gate.adapter[3]):
            assert identical(
                [norm.weight.data, norm.bias.data], [torch.ones_like(norm.weight), torch.zeros_like(norm.bias)]
            )
    assert torch.equal(gates[0].adapter[2].weight, gates[1].adapter[2].weight)  # independent of other random draws
    assert gates[0].identity != gates[1].identity


def test_included_weights_match_their_card_and_do_not_depend_on_the_seed():
    first, other = (build_gate(DigitsTrunk(), None, whole=False, seed=seed) for seed in (0, 1))
    assert identical(dict(first.trunk.state_dict()), dict(other.trunk.state_dict()))
    assert first.identity == other.identity
    assert DigitsTrunk().fingerprint() == f"sha256:{weights_file.digest(WEIGHTS)}"
    with torch.no_grad():
        assert first.features(noise(4, 16)).std(dim=0).max() > 0.1


def test_an_included_file_that_differs_from_its_card_is_an_error(tmp_path, monkeypatch):
    state = {name: one.contiguous() for name, one in DigitsTrunk().outlined().state_dict().items()}
    save_file(state, tmp_path / WEIGHTS.name)
    (tmp_path / WEIGHTS.with_suffix(".json").name).write_text(WEIGHTS.with_suffix(".json").read_text())
    monkeypatch.setattr("fedsweep.methods.fedms.trunk.WEIGHTS", tmp_path / WEIGHTS.name)
    with pytest.raises(UserError) as refusal:
        DigitsTrunk().build(0)
    assert (
        str(refusal.value)
        == "digits_resnet.safetensors does not match the SHA-256 digest in digits_resnet.json; reinstall fedsweep."
    )


@cache
def network(model: str) -> nn.Module:
    """Return a ResNet with a classifier, in which every parameter and running statistic is random."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        whole = stirred(timm.create_model(model, num_classes=1000))
        whole.train()(torch.randn(4, 3, 64, 64))
    return whole.eval()


@pytest.fixture
def written(tmp_path):
    """Return a function that writes a ResNet's weights after `change`, as in `written("w.safetensors", change)`."""

    def write(name: str = "w.safetensors", change=lambda state: state, model: str = "test_resnet") -> Path:
        state = change(dict(network(model).state_dict()))
        path = tmp_path / name
        save_file(state, path) if path.suffix == ".safetensors" else torch.save(state, path)
        return path

    return write


def without(state: dict[str, Tensor], *parts: str) -> dict[str, Tensor]:
    return {name: one for name, one in state.items() if not any(part in name for part in parts)}


@pytest.mark.parametrize(
    ("model", "name", "change"),
    [
        ("test_resnet", "w.safetensors", lambda state: state),
        ("test_resnet", "w.pth", lambda state: state),
        ("test_resnet", "w.safetensors", lambda state: without(state, "fc.")),
        ("test_resnet", "w.safetensors", lambda state: without(state, "num_batches_tracked")),
    ],
    ids=["safetensors", "pth", "no classifier", "no counters"],
)
def test_a_trunk_from_a_file_is_timms_network_without_its_classifier(written, model, name, change):
    path, whole, images = written(name, change, model), network(model), noise(2)
    gate = build_gate(TimmTrunk(model=model, pretrained=str(path)), None, whole=False, seed=0)
    config = timm.get_pretrained_cfg(model)
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (config.mean, config.std))
    with torch.no_grad():
        expected = whole.forward_head(whole.forward_features((images.float() / 255 - mean) / std), pre_logits=True)
        torch.testing.assert_close(gate.features(images), expected, rtol=1e-4, atol=1e-5)
    assert expected.shape == (2, whole.num_features)
    assert expected.std() > 0.01


def test_a_resnets_pixels_are_normalised_with_imagenets_statistics(written):
    gate = build_gate(TimmTrunk(model="resnet18", pretrained=str(written(model="resnet18"))), 4, whole=False, seed=0)
    torch.testing.assert_close(gate.mean.flatten(), torch.tensor([0.485, 0.456, 0.406]))
    torch.testing.assert_close(gate.std.flatten(), torch.tensor([0.229, 0.224, 0.225]))


def test_the_fingerprint_of_a_file_depends_on_its_content(written):
    path = written()
    trunk = TimmTrunk(model="test_resnet", pretrained=str(path))
    first = trunk.fingerprint()
    assert first == f"sha256:{weights_file.digest(path)}"
    identities = [build_gate(trunk, 4, whole=False, seed=seed).identity for seed in (0, 1)]
    assert identities[0] == identities[1]  # no tensor of the trunk is random
    written(change=lambda state: state | {"conv1.0.weight": 2 * state["conv1.0.weight"]})
    assert trunk.fingerprint() != first
    assert build_gate(trunk, 4, whole=False, seed=0).identity != identities[0]
    assert TimmTrunk(model="resnet18.tv_in1k").fingerprint() == "timm:resnet18.tv_in1k"


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda state: without(state, "layer3.0.bn2.weight"), "the file lacks `layer3.0.bn2.weight`"),
        (lambda state: without(state, "running_mean"), "the file lacks `bn1.running_mean` and 14 more"),
        (lambda state: state | {"extra": torch.zeros(1)}, "the file has `extra`, but the model does not"),
        (
            lambda state: state | {"layer1.0.bn1.bias": torch.zeros(3)},
            "`layer1.0.bn1.bias` has shape (3,) in the file, but (32,) in the model",
        ),
    ],
)
def test_weights_of_another_shape_are_an_error(written, change, problem):
    path = written(change=change)
    with pytest.raises(UserError) as refusal:
        build_gate(TimmTrunk(model="test_resnet", pretrained=str(path)), None, whole=False, seed=0)
    assert str(refusal.value) == f"{path} does not fit the model: {problem}."


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"model": "resnet19"},
            "`method.gate.trunk.model` resnet19 is not a model of timm; the nearest are resnet18, ",
        ),
        ({"model": ""}, '`model` string should have at least 1 character, but it is "".'),
        (
            {"model": "resnet18", "pretrained": "nothing"},
            "`method.gate.trunk.pretrained` must be timm, none or a weights file, but it is nothing.",
        ),
        (
            {"model": "resnet18"},
            "`method.gate.trunk.model` resnet18 must include the tag of its weights if "
            "`method.gate.trunk.pretrained` is ",
        ),
        *(
            (
                {"model": "resnet18.foo", "pretrained": pretrained},
                "timm has no weights `foo` of resnet18; available are resnet18.",
            )
            for pretrained in ("timm", "none", "./w.pth")
        ),
    ],
)
def test_an_invalid_trunk_is_one_error_message(changes, sentence):
    with pytest.raises(UserError) as refusal:
        TimmTrunk.of({"name": "timm", **changes}, "run")
    said = str(refusal.value)
    assert said.startswith(f"run: {sentence}")
    assert said.endswith(".")
    assert "\n" not in said


def test_the_error_for_a_missing_file_names_the_trunks_field(tmp_path):
    path = tmp_path / "w.pth"
    trunk = TimmTrunk(model="test_resnet", pretrained=str(path))
    for ask in (trunk.fingerprint, lambda: build_gate(trunk, None, whole=False, seed=0)):
        with pytest.raises(UserError) as refusal:
            ask()
        assert str(refusal.value) == f"`method.gate.trunk.pretrained` {path} does not exist (looked for {path})."


def test_missing_timm_weights_without_network_are_one_error_message(tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError) as refusal:
        build_gate(TimmTrunk(model="resnet18.tv_in1k"), None, whole=False, seed=0)
    said = str(refusal.value)
    assert said.startswith("timm's weights resnet18.tv_in1k are not in the cache and cannot be downloaded (OfflineMode")
    assert "\n" not in said
