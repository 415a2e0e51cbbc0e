"""CLIP models that run block by block, compared with transformers' CLIPModel on small checkpoints."""

import copy
import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from fedsweep.common.errors import UserError
from fedsweep.models import LoraConfig, add_lora, build_model, train_head_alone
from fedsweep.models.clip.model import LayeredClip, Towers
from fedsweep.models.clip.weights import KNOWN
from fedsweep.models.layered import Walk
from fedsweep.testing.compare import identical
from tests.models.clips import (
    DEEP_IMAGES,
    DEEP_TEXT,
    END,
    EQUAL,
    INNER,
    LONGEST,
    MEAN,
    NAMES,
    READ,
    START,
    STD,
    VOCABULARY,
    adapted,
    backbone,
    built,
    copied,
    counted,
    drawn,
    logits_of,
    network,
    noise,
    padded,
    pixels,
    shortened,
    write,
)


@pytest.mark.parametrize("depths", [EQUAL, DEEP_IMAGES, DEEP_TEXT])
@pytest.mark.parametrize("template", ["This is a picture of {}", "{}"])
def test_the_walk_equals_transformers_forward(checkpoint, depths, template):
    folder, images = checkpoint(*depths), noise()
    model, expected = copied(folder, prompt=template), logits_of(network(*depths), folder, images, template)
    assert model.num_layers == max(depths)
    assert not model.training
    with torch.no_grad():
        torch.testing.assert_close(model(images), expected, rtol=1e-4, atol=1e-4)
    assert expected.shape == (5, 4)
    assert min(expected.std(0).min(), expected.std(1).min()) > 0.01


@pytest.mark.parametrize(
    ("depths", "path"),
    [
        (EQUAL, (0, 2)),
        (EQUAL, (1,)),
        (EQUAL, ()),
        (DEEP_IMAGES, (0, 1)),
        (DEEP_IMAGES, (0, 3)),
        (DEEP_IMAGES, (1, 2)),
        (DEEP_TEXT, (0, 1, 3)),
        (DEEP_TEXT, (2,)),
    ],
)
def test_a_skipped_block_is_skipped_in_both_encoders(checkpoint, depths, path):
    folder, images = checkpoint(*depths), noise()
    model, whole = copied(folder), network(*depths)
    with torch.no_grad():
        got = model(images, path)
        torch.testing.assert_close(got, logits_of(shortened(whole, path), folder, images), rtol=1e-4, atol=1e-4)
        assert (got - model(images)).abs().max() > 0.01


def test_features_are_unit_vectors_whose_cosines_are_scaled(checkpoint):
    model, images = copied(checkpoint()), noise()
    with torch.no_grad():
        seen, said = model.features(model.walk(images, range(3))), model.text_features(range(3))
        torch.testing.assert_close(model(images), seen @ said.T * network().logit_scale.exp())
        torch.testing.assert_close(model.placed(model.passed(images, range(3))), seen)
    assert seen.shape == (5, 12)
    assert said.shape == (4, 12)
    for one in (seen, said):
        torch.testing.assert_close(one.norm(dim=1), torch.ones(len(one)))


@pytest.mark.parametrize("depths", [EQUAL, DEEP_TEXT])
def test_prompts_are_padded_to_the_longest_which_does_not_change_the_output(checkpoint, depths):
    from transformers import CLIPModel

    folder = checkpoint(*depths)
    model = copied(folder)
    texts = [f"This is a picture of {name}" for name in READ]
    tokens = padded(folder, texts)
    lengths = tokens["attention_mask"].sum(1)
    assert len(set(lengths.tolist())) > 1
    assert model.prompts.shape == (4, lengths.max())
    assert torch.equal(model.ends, lengths - 1)
    assert torch.equal(model.prompts[torch.arange(4), model.ends], torch.full((4,), END))
    clip = CLIPModel.from_pretrained(folder, attn_implementation="sdpa")
    whole = LayeredClip(Towers(clip), MEAN, STD, lambda _: (tokens["input_ids"], lengths - 1), "{}", NAMES)
    alone = copied(folder, names=("7",))
    assert alone.prompts.shape[1] < model.prompts.shape[1]
    path = range(model.num_layers)
    with torch.no_grad():
        torch.testing.assert_close(model.text_features(path), whole.eval().text_features(path), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(model.text_features(path)[:1], alone.text_features(path), rtol=1e-5, atol=1e-6)


def test_both_formats_of_weights_load(checkpoint, tmp_path):
    images, folder = noise(), write(tmp_path / "clip", network(), "pytorch_model.bin")
    assert not list(folder.glob("*.safetensors"))
    with torch.no_grad():
        expected = copied(checkpoint())(images)
        assert torch.equal(built(folder)(images), expected)
        assert (built(write(tmp_path / "other", network(seed=1)))(images) - expected).abs().max() > 0.1


def test_the_fingerprint_covers_the_weights_file_that_is_read(own):
    first, images = backbone(own).fingerprint(), noise()
    torch.save(dict(network(seed=1).state_dict()), own / "pytorch_model.bin")
    assert backbone(own).fingerprint() == first
    with torch.no_grad():
        torch.testing.assert_close(built(own)(images), logits_of(network(), own, images), rtol=1e-4, atol=1e-4)


def test_half_precision_weights_are_converted_to_single_precision(own):
    half = {name: one.half() for name, one in network().state_dict().items()}
    save_file(half, own / "model.safetensors", metadata={"format": "pt"})
    model = built(own)
    assert {one.dtype for one in model.parameters()} == {torch.float32}
    rounded = copy.deepcopy(network())
    rounded.load_state_dict({name: one.float() for name, one in half.items()})
    with torch.no_grad():
        torch.testing.assert_close(model(noise()), logits_of(rounded, own, noise()), rtol=1e-4, atol=1e-4)


def test_a_build_draws_no_random_numbers_and_prints_nothing(checkpoint, capfd):
    folder = checkpoint()
    capfd.readouterr()
    before = torch.get_rng_state()
    first, again = (build_model(backbone(folder), None, 4, seed) for seed in (0, 1))
    assert torch.equal(torch.get_rng_state(), before)
    assert identical(dict(first.state_dict()), dict(again.state_dict()))
    assert first.class_names == ("0", "1", "2", "3")
    assert not first.trainable()
    assert capfd.readouterr() == ("", "")


def test_in_evaluation_the_prompts_are_encoded_once_for_all_batches(checkpoint):
    model = adapted(checkpoint())
    words, seen = counted(model.backbone.words), counted(model.backbone.stem["embeddings"])
    with torch.no_grad():
        first = [model(noise(3, seed)) for seed in range(5)]
        assert (words[0], seen[0]) == (1, 5)
        short = model(noise(3), (0, 2))
        assert words == [2]  # the prompts are encoded again for another path
        assert torch.equal(model(noise(3), (0, 2)), short)
        assert torch.equal(model(noise(3)), first[0])
        assert words == [2]
    model(noise(3))  # nothing is cached while gradients are enabled
    assert words == [3]


def test_the_prompts_are_encoded_again_for_another_adapter(checkpoint):
    model, images, logits = adapted(checkpoint()), noise(), []
    states = [drawn(model, seed) for seed in (1, 2)]
    of_text = [{name: one for name, one in state.items() if ".text." in name} for state in states]
    assert len(of_text[1]) == 3 * 6 * 2
    for state in (states[0], of_text[1], of_text[0]):
        model.load_adapter(state)
        with torch.no_grad():
            logits.append(model(images))
        torch.testing.assert_close(logits[-1], model(images).detach())
    assert (logits[0] - logits[1]).abs().max() > 0.1
    assert torch.equal(logits[0], logits[2])


def test_the_prompts_are_encoded_again_after_training(checkpoint):
    model, images = adapted(checkpoint()), noise()
    with torch.no_grad():
        before = model(images)
        model.train()
        for name, one in model.trainable().items():
            one.add_(0.1 if ".text." in name else 0.0)
        model.eval()
        assert (model(images) - before).abs().max() > 0.01
    torch.testing.assert_close(model(images).detach(), model.eval()(images).detach())


@pytest.mark.parametrize("depths", [EQUAL, DEEP_IMAGES, DEEP_TEXT])
def test_gradients_reach_the_adapters_of_both_encoders(checkpoint, depths):
    model = adapted(checkpoint(*depths)).train()
    trained = model.trainable()
    loss = F.cross_entropy(model(noise()), torch.tensor([0, 1, 2, 3, 0]))
    gradients = dict(zip(trained, torch.autograd.grad(loss, list(trained.values())), strict=True))
    for tower, depth in zip(("vision", "text"), depths, strict=True):
        own = {name: one for name, one in gradients.items() if f".{tower}." in name}
        assert len(own) == depth * 6 * 2
        assert all(one.isfinite().all() and one.abs().max() > 1e-7 for one in own.values())


def test_gradients_equal_those_of_transformers_forward(checkpoint):
    """The gradients of all weights of the backbone are equal, as full fine-tuning needs them."""
    folder, images, labels = checkpoint(), noise(), torch.tensor([0, 1, 2, 3, 0])
    model, theirs = copied(folder).train(), copy.deepcopy(network()).train()
    tokens = padded(folder, [f"This is a picture of {name}" for name in READ])
    losses = [
        F.cross_entropy(model(images), labels),
        F.cross_entropy(theirs(pixel_values=pixels(images), **tokens).logits_per_image, labels),
    ]
    torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-5)
    for loss in losses:
        torch.autograd.backward(loss)
    expected = {id_of(one): one.grad for one in theirs.parameters()}
    assert len(expected) == sum(1 for _ in model.parameters()) > 100
    for parameter in model.parameters():
        torch.testing.assert_close(parameter.grad, expected[id_of(parameter)], rtol=1e-3, atol=1e-4)


def id_of(parameter: Tensor) -> bytes:
    """Return the bytes of a parameter's values, which identify it in networks that name it differently."""
    return parameter.detach().numpy().tobytes()


def steps_of(model: LayeredClip, path: Walk, trained: Sequence[Tensor], batches: int = 3) -> list[Tensor]:
    """Return the loss and the gradients of the `trained` tensors for each of a few batches, in one list."""
    found = []
    for batch in range(batches):
        loss = F.cross_entropy(model(noise(4, batch), path), torch.tensor([0, 1, 2, 3]))
        found += [loss.detach(), *torch.autograd.grad(loss, list(trained))]
    return found


@pytest.mark.parametrize(
    ("depths", "path", "steps"),
    [(EQUAL, (0, 1, 2), 2), (EQUAL, (0, 2), 1), (DEEP_IMAGES, range(4), 3), (DEEP_TEXT, range(4), 1)],
)
def test_frozen_steps_run_once_and_change_neither_losses_nor_gradients(checkpoint, depths, path, steps):
    model = adapted(checkpoint(*depths)).train()
    upper = [f"backbone.blocks.{layer}." for layer in path[steps:]]
    names = [name for name in model.trainable() if name.startswith(tuple(upper))]
    assert model.frozen_steps(path, names) == steps
    trained = [model.trainable()[name] for name in names]
    expected = steps_of(model, path, trained)
    of_text = {
        layer: counted(block["text"]) for layer, block in enumerate(model.backbone.blocks) if "text" in block
    } | {"words": counted(model.backbone.words)}
    with model.frozen(path, steps):
        got = steps_of(model, path, trained)
    assert of_text == {
        layer: [1 if layer == "words" or layer in path[:steps] else 3 if layer in path else 0] for layer in of_text
    }
    assert len(got) == len(expected) == 3 * (1 + len(names))
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    steps_of(model, path, trained, batches=1)
    assert of_text["words"] == [2]  # nothing after learned context vectors is cached


def test_only_steps_that_are_not_frozen_have_dropout(checkpoint):
    model = adapted(checkpoint(), dropout=0.5).train()
    modes = {}
    with model.frozen(range(3), 2):
        for layer, block in enumerate(model.backbone.blocks):
            modes[layer] = {module.training for module in block.modules()}
    assert modes == {0: {False}, 1: {False}, 2: {True}}
    assert all(module.training for module in model.modules())
    with pytest.raises(ZeroDivisionError), model.frozen(range(3), 2):
        _ = 1 / 0
    assert all(module.training for module in model.modules())


def test_frozen_steps_use_the_current_adapter(checkpoint):
    model, path = adapted(checkpoint()).train(), range(3)
    losses = []
    for seed in (1, 2):
        model.load_adapter(drawn(model, seed))
        with model.frozen(path, 2):
            losses.append(F.cross_entropy(model(noise(4)), torch.arange(4)))
        torch.testing.assert_close(losses[-1], F.cross_entropy(model(noise(4)), torch.arange(4)))
    assert (losses[0] - losses[1]).abs() > 0.01


@pytest.mark.parametrize(
    ("position", "depths"), [*((one, DEEP_IMAGES) for one in INNER), ("all", DEEP_TEXT), ("mlp", EQUAL)]
)
def test_the_position_selects_the_adapted_layers_of_both_encoders(checkpoint, position, depths):
    model = adapted(checkpoint(*depths), position, rank=3)
    expected = {
        f"backbone.blocks.{max(depths) - depth + layer}.{tower}.{place}.lora_{letter}.default.weight"
        for tower, depth in zip(("vision", "text"), depths, strict=True)
        for layer in range(depth)
        for place in INNER[position]
        for letter in "AB"
    }
    assert set(model.trainable()) == expected
    assert len(expected) == sum(depths) * len(INNER[position]) * 2
    assert set(backbone(checkpoint(*depths)).positions) == set(INNER)
    for name, one in model.trainable().items():
        assert one.shape[0 if ".lora_A." in name else 1] == 3


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("openai/clip-vit-base-patch16", 149_620_737),
        ("openai/clip-vit-large-patch14", 427_616_513),
    ],
)
def test_known_shapes_have_the_papers_counts_without_a_download(name, parameters):
    model = backbone(name).outlined(101)
    assert sum(one.numel() for one in model.parameters()) == parameters
    assert {one.device.type for one in (*model.parameters(), *model.buffers())} == {"meta"}


@pytest.mark.parametrize("name", KNOWN)
def test_known_shapes_have_the_patches_and_the_image_size_of_their_name(name):
    said = re.fullmatch(r"openai/clip-vit-(base|large)-patch(\d+)(?:-(\d+))?", name)
    assert said is not None
    size, patch = int(said[3] or 224), int(said[2])
    config = backbone(name)
    width, depth = {"base": (768, 12), "large": (1024, 24)}[said[1]]
    assert (config.image_size, config.depth) == (size, depth)
    embedding = config.outlined(2).backbone.stem["embeddings"]
    assert embedding.patch_embedding.weight.shape == (width, 3, patch, patch)
    assert embedding.position_embedding.num_embeddings == 1 + (size // patch) ** 2


def test_rank_one_on_both_linears_of_every_mlp_has_the_papers_count():
    model = backbone("openai/clip-vit-base-patch16").outlined(101)
    add_lora(model, LoraConfig(rank=1, scaling=1.0, position="mlp"), seed=0)
    assert sum(one.numel() for one in model.trainable().values()) == 153_600


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("openai/clip-vit-base-patch32", (12, 768, 224, 512)),
        ("openai/clip-vit-base-patch16", (12, 768, 224, 512)),
        ("openai/clip-vit-large-patch14", (24, 1024, 224, 768)),
        ("openai/clip-vit-large-patch14-336", (24, 1024, 336, 768)),
    ],
)
def test_depth_width_and_size_of_a_known_name(name, expected):
    config = backbone(name)
    assert (config.depth, config.width, config.image_size, config.largest_rank("all")) == expected
    assert config.has_text
    assert not config.has_head


@pytest.mark.parametrize("depths", [EQUAL, DEEP_IMAGES, DEEP_TEXT])
def test_depth_width_and_size_of_a_folder(checkpoint, depths):
    config = backbone(checkpoint(*depths))
    assert (config.depth, config.width, config.image_size, config.largest_rank("mlp")) == (max(depths), 24, 16, 16)
    outline = config.outlined(4)
    shapes = {name: one.shape for name, one in outline.named_parameters()}
    assert shapes == {name: one.shape for name, one in copied(checkpoint(*depths)).named_parameters()}


def with_words(clip: Any, vectors: Tensor) -> Any:
    """Return a copy of transformers' CLIP with `vectors` appended to its vocabulary."""
    clip = copy.deepcopy(clip)
    known = clip.text_model.embeddings.token_embedding.weight.detach()
    clip.text_model.embeddings.token_embedding = nn.Embedding.from_pretrained(torch.cat([known, vectors]))
    return clip


@pytest.mark.parametrize("depths", [EQUAL, DEEP_TEXT])
@pytest.mark.parametrize("count", [16, 1])
def test_context_vectors_follow_the_start_token_and_precede_the_class_name(checkpoint, depths, count):
    folder, images = checkpoint(*depths), noise()
    model = copied(folder)
    before = model(images).detach()
    model.add_context(count, seed=0)
    with torch.no_grad():
        model.prompt["context"].normal_(std=0.3, generator=torch.Generator().manual_seed(1))
    names = padded(folder, [f"{name}." for name in READ])["input_ids"][:, : LONGEST - count]
    rows = torch.arange(VOCABULARY, VOCABULARY + count).expand(4, -1)
    prompts = torch.cat([names[:, :1], rows, names[:, 1:]], dim=1)
    assert (prompts[:, 0] == START).all()
    theirs = with_words(network(*depths), model.prompt["context"].detach())
    with torch.no_grad():
        expected = theirs(input_ids=prompts, pixel_values=pixels(images))
    torch.testing.assert_close(model.text_features(range(model.num_layers)).detach(), expected.text_embeds)
    torch.testing.assert_close(model(images).detach(), expected.logits_per_image, rtol=1e-4, atol=1e-4)
    assert (expected.logits_per_image - before).abs().max() > 0.01


def test_context_vectors_depend_on_the_seed_and_are_the_only_trainable_tensors(checkpoint):
    states = []
    for seed in (0, 0, 1):
        model = copied(checkpoint())
        train_head_alone(model)
        assert not model.trainable()
        model.add_context(16, seed)
        assert list(model.trainable()) == ["prompt.context"]
        assert model.trainable()["prompt.context"].shape == (16, 16)
        states.append(model.adapter())
    assert identical(states[0], states[1])
    assert not identical(states[0], states[2])
    assert states[0]["prompt.context"].std().item() == pytest.approx(0.02, rel=0.15)
    loss = F.cross_entropy(model.train()(noise(4)), torch.arange(4))
    (gradient,) = torch.autograd.grad(loss, [model.prompt["context"]])
    assert (gradient.abs().amax(dim=1) > 0).all()


def test_context_vectors_get_a_gradient_through_frozen_blocks(checkpoint):
    model, path = copied(checkpoint()).requires_grad_(False), range(3)
    model.add_context(4, seed=0)
    model.train()
    assert model.frozen_steps(path, list(model.trainable())) == 3
    expected = steps_of(model, path, [model.prompt["context"]])
    with model.frozen(path, 3):
        got = steps_of(model, path, [model.prompt["context"]])
    assert len(got) == 6
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_adding_context_vectors_discards_cached_features(checkpoint):
    model, images = copied(checkpoint()), noise()
    with torch.no_grad():
        model(images)
        model.add_context(16, seed=0)
        remembered = model(images)
    torch.testing.assert_close(remembered, model(images).detach())


def test_a_prompt_longer_than_the_text_encoder_allows_is_an_error(checkpoint):
    folder = checkpoint()
    name = " ".join(["7"] * 30)  # 32 tokens including start and end
    assert copied(folder, names=(name, "dog"), prompt="{}").prompts.shape == (2, LONGEST)
    with pytest.raises(UserError) as refusal:
        built(folder, names=("dog", f"{name} 7", "7"), prompt="{}")
    assert str(refusal.value) == f"a prompt must have at most 32 tokens, but `{name} 7` has 33."
    with pytest.raises(UserError) as refusal:
        backbone(folder, prompt="{} 7").check_weights(2, ("dog", name))
    assert str(refusal.value) == f"a prompt must have at most 32 tokens, but `{name} 7` has 33."


def test_context_vectors_that_leave_no_room_for_a_name_are_an_error(checkpoint):
    model = copied(checkpoint(), names=("7", "8"))  # tokens: start, 7, dot, end
    model.add_context(28, seed=0)
    assert model.text_features(range(3)).shape == (2, 12)
    with pytest.raises(UserError) as refusal:
        model.add_context(29, seed=0)
    assert str(refusal.value) == "a prompt must have at most 32 tokens, but `7.` has 33."
