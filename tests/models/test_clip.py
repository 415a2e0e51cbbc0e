"""CLIP walked block by block is transformers' CLIPModel, on checkpoints that are written here; and those that ship."""

import copy
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
import torch.nn.functional as F
from huggingface_hub import constants
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fedsweep.data.digits import DigitsData
from fedsweep.errors import UserError
from fedsweep.models import ClipBackbone, DigitsClip, LoraConfig, add_lora, build_model, train_head_alone
from fedsweep.models.clip import LayeredClip, Towers
from fedsweep.models.clip_backbone import SHIPPED
from fedsweep.models.clip_checkpoint import Tokenizer
from fedsweep.models.layered import Path as Walk
from tests.compare import identical
from tests.models.small import stirred
from tests.mould import Mould

NAMES = ("7", "no_one", "OneHand", "three")
READ = ("7", "no one", "One Hand", "three")
MEAN, STD = [0.1, 0.2, 0.3], [0.4, 0.5, 0.6]
VOCABULARY, LONGEST, START, END = 609, 32, 607, 608
EQUAL, DEEP_IMAGES, DEEP_TEXT = (3, 3), (4, 2), (2, 4)
INNER = {
    "l0": ["self_attn.out_proj"],
    "l1": ["mlp.fc2"],
    "both": ["self_attn.out_proj", "mlp.fc2"],
    "mlp": ["mlp.fc1", "mlp.fc2"],
    "attention": [f"self_attn.{one}_proj" for one in ("q", "k", "v", "out")],
    "all": [*(f"self_attn.{one}_proj" for one in ("q", "k", "v", "out")), "mlp.fc1", "mlp.fc2"],
}
"""Linears of a block, by position."""


@cache
def network(vision: int = 3, text: int = 3, seed: int = 0) -> Any:
    """transformers' own CLIP, as small as can be, in which every tensor matters."""
    from transformers import CLIPConfig, CLIPModel

    special = {"bos_token_id": START, "eos_token_id": END, "pad_token_id": END}
    shape = {"num_attention_heads": 2, "hidden_act": "quick_gelu"}
    config = CLIPConfig(
        vision_config=shape
        | {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": vision, "image_size": 16, "patch_size": 8},
        text_config=shape
        | special
        | {"hidden_size": 16, "intermediate_size": 28, "num_hidden_layers": text}
        | {"vocab_size": VOCABULARY, "max_position_embeddings": LONGEST},
        projection_dim=12,
        attn_implementation="eager",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return stirred(CLIPModel(config), seed)


def write(folder: Path, clip: Any, weights: str = "model.safetensors") -> Path:
    """A checkpoint in transformers' layout."""
    clip.save_pretrained(folder)
    if weights != "model.safetensors":
        torch.save(dict(clip.state_dict()), folder / weights)
        (folder / "model.safetensors").unlink()
    for name in ("vocab.json", "merges.txt"):
        shutil.copy(SHIPPED / "digits_clip" / name, folder / name)
    (folder / "preprocessor_config.json").write_text(json.dumps({"image_mean": MEAN, "image_std": STD}))
    return folder


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Callable[..., Path]:
    """The folder of a checkpoint, written once: `checkpoint(vision, text)`. Nobody changes it."""

    @cache
    def written(vision: int = 3, text: int = 3) -> Path:
        return write(tmp_path_factory.mktemp("clip"), network(vision, text))

    return written


@pytest.fixture
def own(tmp_path) -> Path:
    """A checkpoint that the test may spoil."""
    return write(tmp_path / "clip", network())


def backbone(folder: Path | str, **changes: Any) -> ClipBackbone:
    return ClipBackbone.of({"name": "clip", "model": str(folder), **changes}, "test")


def built(folder: Path, names: Sequence[str] = NAMES, **changes: Any) -> LayeredClip:
    return backbone(folder, **changes).build(len(names), class_names=names)


@cache
def mould(folder: Path, names: Sequence[str], prompt: str) -> Mould:
    return Mould(built(folder, names, prompt=prompt))


def copied(folder: Path, names: Sequence[str] = NAMES, prompt: str = "This is a picture of {}") -> LayeredClip:
    """As `built` of a checkpoint that nobody changes, which is read once."""
    model: LayeredClip = mould(folder, names, prompt).cast()
    return model


def noise(count: int = 5, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count, 3, 16, 16), dtype=torch.uint8, generator=generator)


def pixels(images: Tensor) -> Tensor:
    mean, std = (torch.tensor(one).view(3, 1, 1) for one in (MEAN, STD))
    return (images.float() / 255 - mean) / std


def padded(folder: Path, texts: Sequence[str]) -> dict[str, Tensor]:
    """Tokens of transformers' own tokenizer, as OpenAI feeds them: as many for every text."""
    from transformers import CLIPTokenizer

    found = CLIPTokenizer.from_pretrained(folder)(
        list(texts), padding="max_length", max_length=LONGEST, return_tensors="pt"
    )
    return dict(found)


@torch.no_grad()
def logits_of(clip: Any, folder: Path, images: Tensor, template: str = "This is a picture of {}") -> Tensor:
    """transformers' own logits (images, classes)."""
    tokens = padded(folder, [template.format(name) for name in READ])
    return clip(pixel_values=pixels(images), **tokens).logits_per_image


def shortened(clip: Any, path: Sequence[int]) -> Any:
    """transformers' CLIP without the blocks that are not on the path; both encoders end in the topmost one."""
    clip = copy.deepcopy(clip)
    encoders = [clip.vision_model.encoder, clip.text_model.encoder]
    depth = max(len(one.layers) for one in encoders)
    for one in encoders:
        missing = depth - len(one.layers)
        one.layers = nn.ModuleList(one.layers[layer - missing] for layer in path if layer >= missing)
    return clip


def adapted(folder: Path, position: str = "all", **changes: Any) -> LayeredClip:
    """A model whose adapters of rank 2 are drawn, so that they change what it computes."""
    lora = LoraConfig(**{"rank": 2, "scaling": 1.0, "dropout": 0.0, "position": position, **changes})
    model = copied(folder)
    add_lora(model, lora, seed=0)
    model.load_adapter(drawn(model.eval(), seed=1))
    return model


def drawn(model: LayeredClip, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: 0.3 * torch.randn(one.shape, generator=generator) for name, one in model.adapter().items()}


def counted(module: nn.Module) -> list[int]:
    """Counts the calls of a module from now on, in the list's one entry."""
    calls = [0]

    def note(*_: Any) -> None:
        calls[0] += 1

    module.register_forward_hook(note)
    return calls


@pytest.mark.parametrize("depths", [EQUAL, DEEP_IMAGES, DEEP_TEXT])
@pytest.mark.parametrize("template", ["This is a picture of {}", "{}"])
def test_the_walk_is_transformers_forward(checkpoint, depths, template):
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
        torch.testing.assert_close(model.passed(images, range(3)), seen)
    assert seen.shape == (5, 12)
    assert said.shape == (4, 12)
    for one in (seen, said):
        torch.testing.assert_close(one.norm(dim=1), torch.ones(len(one)))


@pytest.mark.parametrize("depths", [EQUAL, DEEP_TEXT])
def test_prompts_are_cut_behind_the_longest_which_changes_nothing(checkpoint, depths):
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


def test_of_two_files_of_weights_the_one_that_is_read_is_pinned(own):
    first, images = backbone(own).fingerprint(), noise()
    torch.save(dict(network(seed=1).state_dict()), own / "pytorch_model.bin")
    assert backbone(own).fingerprint() == first
    with torch.no_grad():
        torch.testing.assert_close(built(own)(images), logits_of(network(), own, images), rtol=1e-4, atol=1e-4)


def test_weights_in_half_precision_are_computed_with_in_single(own):
    half = {name: one.half() for name, one in network().state_dict().items()}
    save_file(half, own / "model.safetensors", metadata={"format": "pt"})
    model = built(own)
    assert {one.dtype for one in model.parameters()} == {torch.float32}
    rounded = copy.deepcopy(network())
    rounded.load_state_dict({name: one.float() for name, one in half.items()})
    with torch.no_grad():
        torch.testing.assert_close(model(noise()), logits_of(rounded, own, noise()), rtol=1e-4, atol=1e-4)


def test_a_build_draws_nothing_and_says_nothing(checkpoint, capfd):
    folder = checkpoint()
    capfd.readouterr()
    before = torch.get_rng_state()
    first, again = (build_model(backbone(folder), None, 4, seed) for seed in (0, 1))
    assert torch.equal(torch.get_rng_state(), before)
    assert identical(dict(first.state_dict()), dict(again.state_dict()))
    assert first.class_names == ("0", "1", "2", "3")
    assert not first.trainable()
    assert capfd.readouterr() == ("", "")


def test_in_evaluation_the_prompts_are_read_once_for_all_batches(checkpoint):
    model = adapted(checkpoint())
    words, seen = counted(model.backbone.words), counted(model.backbone.stem["embeddings"])
    with torch.no_grad():
        first = [model(noise(3, seed)) for seed in range(5)]
        assert (words[0], seen[0]) == (1, 5)
        short = model(noise(3), (0, 2))
        assert words == [2]  # of another walk
        assert torch.equal(model(noise(3), (0, 2)), short)
        assert torch.equal(model(noise(3)), first[0])
        assert words == [2]
    model(noise(3))  # where a gradient may be asked for, nothing is remembered
    assert words == [3]


def test_another_adapter_is_another_text_encoder(checkpoint):
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


def test_prompts_are_read_anew_after_training(checkpoint):
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


def test_gradients_are_those_of_transformers_forward(checkpoint):
    """Of the weights themselves, as full fine-tuning takes them."""
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
    """A parameter by its values: two networks of the same checkpoint name them differently."""
    return parameter.detach().numpy().tobytes()


def steps_of(model: LayeredClip, path: Walk, trained: Sequence[Tensor], batches: int = 3) -> list[Tensor]:
    """Losses and gradients of a few batches."""
    found = []
    for batch in range(batches):
        loss = F.cross_entropy(model(noise(4, batch), path), torch.tensor([0, 1, 2, 3]))
        found += [loss.detach(), *torch.autograd.grad(loss, list(trained))]
    return found


@pytest.mark.parametrize(
    ("depths", "path", "steps"),
    [(EQUAL, (0, 1, 2), 2), (EQUAL, (0, 2), 1), (DEEP_IMAGES, range(4), 3), (DEEP_TEXT, range(4), 1)],
)
def test_frozen_steps_change_neither_losses_nor_gradients_and_are_run_once(checkpoint, depths, path, steps):
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
    assert of_text["words"] == [2]  # behind the context nothing is remembered


def test_frozen_steps_have_no_dropout_and_the_others_keep_theirs(checkpoint):
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


def test_frozen_steps_are_read_from_the_adapter_of_the_moment(checkpoint):
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
def test_adapters_sit_where_the_position_says_in_both_encoders(checkpoint, position, depths):
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
def test_known_shapes_have_the_papers_counts_before_they_are_there(name, parameters):
    model = backbone(name).outlined(101)
    assert sum(one.numel() for one in model.parameters()) == parameters
    assert {one.device.type for one in (*model.parameters(), *model.buffers())} == {"meta"}


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
    """transformers' CLIP whose vocabulary goes on with these vectors."""
    clip = copy.deepcopy(clip)
    known = clip.text_model.embeddings.token_embedding.weight.detach()
    clip.text_model.embeddings.token_embedding = nn.Embedding.from_pretrained(torch.cat([known, vectors]))
    return clip


@pytest.mark.parametrize("depths", [EQUAL, DEEP_TEXT])
@pytest.mark.parametrize("count", [16, 1])
def test_context_vectors_stand_between_the_start_and_the_bare_name(checkpoint, depths, count):
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


def test_context_vectors_start_from_their_seed_and_are_all_that_a_gradient_moves(checkpoint):
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


def test_context_vectors_get_their_gradient_through_frozen_blocks(checkpoint):
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


def test_context_vectors_replace_what_was_remembered(checkpoint):
    model, images = copied(checkpoint()), noise()
    with torch.no_grad():
        model(images)
        model.add_context(16, seed=0)
        remembered = model(images)
    torch.testing.assert_close(remembered, model(images).detach())


def test_a_prompt_may_be_as_long_as_the_text_encoder_reads_but_not_longer(checkpoint):
    folder = checkpoint()
    name = " ".join(["7"] * 30)  # with start and end 32 tokens
    assert copied(folder, names=(name, "dog"), prompt="{}").prompts.shape == (2, LONGEST)
    with pytest.raises(UserError) as refusal:
        built(folder, names=("dog", f"{name} 7", "7"), prompt="{}")
    assert str(refusal.value) == f"a prompt must have at most 32 tokens, but `{name} 7` has 33."
    with pytest.raises(UserError) as refusal:
        backbone(folder, prompt="{} 7").check_weights(2, ("dog", name))
    assert str(refusal.value) == f"a prompt must have at most 32 tokens, but `{name} 7` has 33."


def test_context_that_leaves_no_room_for_a_name_is_refused(checkpoint):
    model = copied(checkpoint(), names=("7", "8"))  # start, 7, dot, end
    model.add_context(28, seed=0)
    assert model.text_features(range(3)).shape == (2, 12)
    with pytest.raises(UserError) as refusal:
        model.add_context(29, seed=0)
    assert str(refusal.value) == "a prompt must have at most 32 tokens, but `7.` has 33."


def refused(act: Callable[[], object], sentence: str) -> None:
    with pytest.raises(UserError) as refusal:
        act()
    said = str(refusal.value)
    assert "\n" not in said
    assert said.endswith(".")
    assert said.startswith(sentence)
    if sentence.endswith("."):
        assert said == sentence


@pytest.mark.parametrize(
    ("gone", "named"),
    [
        ("config.json", "config.json"),
        ("preprocessor_config.json", "preprocessor_config.json"),
        ("vocab.json", "vocab.json"),
        ("merges.txt", "merges.txt"),
        ("model.safetensors", "model.safetensors or pytorch_model.bin"),
    ],
)
def test_a_folder_without_a_file_is_refused(own, gone, named):
    before = backbone(own)
    (own / gone).unlink()
    sentence = f"`backbone.model` {own} is a folder without {named} ({own})."
    for act in (before.fingerprint, lambda: before.check_weights(4), lambda: before.build(4)):
        refused(act, sentence)
    elsewhere = own.rename(own.with_name("elsewhere"))
    refused(lambda: backbone(elsewhere), f"test: {sentence.replace(str(own), str(elsewhere))}")


def test_a_folder_is_found_beside_the_data(own, monkeypatch):
    monkeypatch.setenv("FEDSWEEP_DATA", str(own.parent))
    monkeypatch.setenv("FEDSWEEP_HOME", str(own.parent / "home"))
    assert backbone(own.name).fingerprint() == backbone(own).fingerprint()


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ('{"model_type": "siglip"}', "`model_type` is siglip."),
        ("{}", "`model_type` is None."),
        ("{", "Expecting property name enclosed in double quotes: line 1 column 2 (char 1)."),
        ("[]", "'list' object has no attribute 'get'."),
        (
            '{"model_type": "clip", "vision_config": {"hidden_size": "x"}}',
            "`vision_config.hidden_size` must be a whole number above 0, but it is x.",
        ),
        (
            '{"model_type": "clip", "text_config": {"num_hidden_layers": 0}}',
            "`text_config.num_hidden_layers` must be a whole number above 0, but it is 0.",
        ),
    ],
)
def test_a_config_of_another_kind_is_refused(own, content, why):
    (own / "config.json").write_text(content)
    refused(lambda: backbone(own), f"test: `backbone.model` {own} is not a CLIP that transformers can read: {why}")


@pytest.mark.parametrize("weights", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("kept", [0, 0.5])
def test_truncated_weights_are_refused(tmp_path, weights, kept):
    folder = write(tmp_path / "clip", network(), weights)
    content = (folder / weights).read_bytes()
    (folder / weights).write_bytes(content[: int(kept * len(content))])
    refused(lambda: built(folder), f"`backbone.model` {folder} cannot be loaded: ")


class Trap:
    """What a pickle could do."""

    def __reduce__(self):
        return os.mkdir, ("sprung",)


def test_nothing_in_a_pickle_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = write(tmp_path / "clip", network(), "pytorch_model.bin")
    torch.save({"a": Trap()}, folder / "pytorch_model.bin")
    refused(lambda: built(folder), f"`backbone.model` {folder} cannot be loaded: ")
    assert not (tmp_path / "sprung").exists()


LACKING = "text_model.encoder.layers.1.mlp.fc1.bias"


def test_a_missing_tensor_is_refused_by_its_name(own):
    state = load_file(own / "model.safetensors")
    del state[LACKING]
    save_file(state, own / "model.safetensors", metadata={"format": "pt"})
    refused(
        lambda: built(own),
        f"`backbone.model` {own} lacks tensors of a CLIP or has them in another shape: {LACKING}.",
    )


def test_a_tensor_of_another_shape_is_refused(own):
    state = load_file(own / "model.safetensors")
    state[LACKING] = torch.zeros(3)
    save_file(state, own / "model.safetensors", metadata={"format": "pt"})
    refused(lambda: built(own), f"`backbone.model` {own} ")


def test_weights_that_are_no_numbers_are_refused(own):
    state = load_file(own / "model.safetensors")
    state[LACKING] = torch.full_like(state[LACKING], float("nan"))
    save_file(state, own / "model.safetensors", metadata={"format": "pt"})
    refused(lambda: built(own), f"the weights of `backbone.model` {own} give logits that are not finite numbers.")


@pytest.mark.parametrize(("name", "content"), [("vocab.json", "{"), ("vocab.json", "[]"), ("merges.txt", "xx")])
def test_a_broken_tokenizer_is_refused(own, name, content):
    (own / name).write_text(content)
    refused(lambda: built(own), f"the tokenizer in {own} cannot be read: ")


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        "{}",
        '{"image_mean": [0.5, 0.5], "image_std": [0.5, 0.5]}',
        '{"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.0, 0.5]}',
        '{"image_mean": ["a", "b", "c"], "image_std": [0.5, 0.5, 0.5]}',
    ],
)
def test_a_broken_normalisation_is_refused(own, content):
    (own / "preprocessor_config.json").write_text(content)
    refused(lambda: built(own), f"`backbone.model` {own} ")


def test_a_build_proves_its_walk(checkpoint, monkeypatch):
    monkeypatch.setattr(LayeredClip, "block", lambda model, layer, tokens: 2 * model._run("vision", layer, tokens))
    refused(
        lambda: built(checkpoint()),
        f"`backbone.model` {checkpoint()} cannot be used: walked block by block it gives other logits than "
        "transformers.",
    )


@pytest.mark.parametrize(
    "prompt",
    [
        "a picture",
        "{} or {}",
        "{name}",
        "{} of {name}",
        "{{}}",
        "{0}",
        "",
        "a } of {}",
    ],
)
@pytest.mark.parametrize("name", ["clip", "digits_clip"])
def test_a_prompt_without_one_place_for_the_name_is_refused(name, prompt):
    kind, model = (ClipBackbone, {"model": "openai/clip-vit-base-patch16"}) if name == "clip" else (DigitsClip, {})

    def ask() -> None:
        config = kind.of({"name": name, "prompt": prompt, **model}, "run")
        config.prompt.format("dog")

    refused(ask, f"run: `backbone.prompt` must have {{}} once, for the class's name, but it is `{prompt}`.")


@pytest.fixture
def offline(tmp_path, monkeypatch) -> Path:
    """An empty cache of the hub, and no network."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize("model", ["nobody/nothing", "nothing"])
def test_an_unknown_name_is_refused_without_network(model):
    refused(
        lambda: backbone(model),
        f"test: `backbone.model` {model} is neither a folder nor in the hub's cache and cannot be downloaded (Offline",
    )


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize("model", ["./nothing", "a/b/c", "a b"])
def test_what_is_no_name_of_the_hub_is_refused(model):
    refused(
        lambda: backbone(model),
        f"test: `backbone.model` {model} is neither a folder nor the name of a model on the hub.",
    )


@pytest.mark.usefixtures("offline")
def test_a_known_name_can_be_planned_without_network_but_not_loaded():
    config = backbone("openai/clip-vit-base-patch16")
    assert config.depth == 12
    for act in (config.fingerprint, lambda: config.check_weights(4), lambda: config.build(4)):
        refused(
            act,
            "`backbone.model` openai/clip-vit-base-patch16 is neither a folder nor in the hub's cache and cannot be "
            "downloaded (OfflineModeIsEnabled: ",
        )


def cached(hub: Path, model: str, folder: Path) -> Path:
    """Put a folder into the hub's cache, in its layout."""
    commit = "0" * 40
    place = hub / f"models--{model.replace('/', '--')}"
    (place / "refs").mkdir(parents=True)
    (place / "refs" / "main").write_text(commit)
    return Path(shutil.copytree(folder, place / "snapshots" / commit))


def test_a_checkpoint_in_the_hubs_cache_is_taken_without_the_network(checkpoint, offline):
    cached(offline, "somebody/tiny-clip", checkpoint())
    config = backbone("somebody/tiny-clip")
    assert config.fingerprint() == backbone(checkpoint()).fingerprint()
    with torch.no_grad():
        assert torch.equal(config.build(4, class_names=NAMES)(noise()), copied(checkpoint())(noise()))


@pytest.fixture
def hub(checkpoint, tmp_path, monkeypatch) -> Callable[[Path], list[Any]]:
    """A hub with one checkpoint: what is asked of it is noted."""

    def serve(folder: Path) -> list[Any]:
        asked: list[Any] = []

        def snapshot(model: str, allow_patterns: Sequence[str], local_files_only: bool = False) -> str:
            if local_files_only:
                raise LocalEntryNotFoundError("not there")
            asked.append(list(allow_patterns))
            here = shutil.copytree(folder, tmp_path / model / str(len(asked)))
            for one in here.iterdir():
                if one.name not in allow_patterns:
                    one.unlink()
            return str(here)

        monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
        monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", lambda url, **_: asked.append(url))
        return asked

    return serve


def test_a_name_is_downloaded_with_safetensors_or_else_with_a_pickle(checkpoint, tmp_path, hub):
    asked = hub(checkpoint())
    config = backbone("somebody/one")
    assert asked[0].endswith("somebody/one/resolve/main/config.json")
    assert len(asked) == 2
    assert "model.safetensors" in asked[1]
    assert "pytorch_model.bin" not in asked[1]
    with torch.no_grad():
        expected = copied(checkpoint())(noise())
        assert torch.equal(config.build(4, class_names=NAMES)(noise()), expected)
    asked = hub(write(tmp_path / "pickled", network(), "pytorch_model.bin"))
    with torch.no_grad():
        assert torch.equal(backbone("somebody/two").build(4, class_names=NAMES)(noise()), expected)
    assert "pytorch_model.bin" in asked[2]


def test_an_unreachable_hub_is_asked_once(hub, checkpoint, monkeypatch):
    asked = hub(checkpoint())

    def unreachable(url: str, **_: Any) -> None:
        asked.append(url)
        raise ConnectionError("no route to host\nand a traceback")

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", unreachable)
    refused(
        lambda: backbone("somebody/three"),
        "test: `backbone.model` somebody/three is neither a folder nor in the hub's cache and cannot be downloaded "
        "(ConnectionError: no route to host and a traceback); load it once where there is a network.",
    )
    assert len(asked) == 1


def test_a_part_of_a_checkpoint_in_the_cache_is_completed(checkpoint, offline, monkeypatch):
    """As transformers leaves it that has loaded the model but no tokenizer."""
    part = cached(offline, "somebody/part", checkpoint())
    for name in ("vocab.json", "merges.txt", "preprocessor_config.json"):
        (part / name).unlink()
    refused(
        lambda: backbone("somebody/part"),
        "test: `backbone.model` somebody/part is neither a folder nor in the hub's cache and cannot be downloaded ",
    )


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("model.safetensors", None),
        ("preprocessor_config.json", ('"image_std": [0.4', '"image_std": [0.41')),
        ("preprocessor_config.json", ('"image_mean": [0.1', '"image_mean": [0.11')),
        ("config.json", ("quick_gelu", "gelu")),
        ("vocab.json", ('"!": 0', '"!!": 0')),
        ("merges.txt", ("t h\n", "h t\n")),
        ("tokenizer.json", "new"),
        ("tokenizer_config.json", "new"),
    ],
)
def test_a_fingerprint_is_of_weights_shape_tokens_and_normalisation(own, name, change):
    (own / "README.md").write_text("one")
    first = backbone(own).fingerprint()
    (own / "README.md").write_text("two")
    assert backbone(own).fingerprint() == first
    assert first.startswith("sha256:")
    if change is None:
        save_file(dict(network(seed=1).state_dict()), own / name, metadata={"format": "pt"})
    elif change == "new":
        tokens = Tokenizer(own)(["0", "1"])[0]
        other_tokens(own, name)
        assert not torch.equal(Tokenizer(own.rename(own.with_name("moved")))(["0", "1"])[0], tokens)
        own.with_name("moved").rename(own)
    else:
        content = (own / name).read_text()
        assert change[0] in content
        (own / name).write_text(content.replace(*change))
    assert backbone(own).fingerprint() != first


def other_tokens(folder: Path, name: str) -> None:
    """Files that transformers reads before vocab.json and merges.txt, or beside them."""
    from transformers import CLIPTokenizer

    if name == "tokenizer_config.json":
        (folder / name).write_text(json.dumps({"bos_token": "!"}))
        return
    CLIPTokenizer.from_pretrained(folder).save_pretrained(folder / "saved")
    said = json.loads((folder / "saved" / name).read_text())
    vocabulary = said["model"]["vocab"]
    vocabulary["0</w>"], vocabulary["1</w>"] = vocabulary["1</w>"], vocabulary["0</w>"]
    (folder / name).write_text(json.dumps(said))
    shutil.rmtree(folder / "saved")


ENCODERS = {"base": "digits_clip", "patch8": "digits_clip_patch8", "large": "digits_clip_large"}


def test_all_encoders_that_ship_are_checked_and_small():
    folders = [one for one in SHIPPED.iterdir() if one.is_dir()]
    assert sorted(one.name for one in folders) == sorted(ENCODERS.values())
    files = [one for folder in folders for one in folder.rglob("*") if one.is_file()]
    assert len(files) == 3 * 7
    assert sum(one.stat().st_size for one in files) < 5_300_000


@pytest.mark.parametrize(("encoder", "folder"), ENCODERS.items())
def test_a_shipped_encoder_has_a_card_and_knows_digits_by_their_names(encoder, folder):
    config = DigitsClip.of({"name": "digits_clip", "encoder": encoder}, "test")
    card = json.loads((SHIPPED / folder / "card.json").read_text())
    content = (SHIPPED / folder / "model.safetensors").read_bytes()
    assert card["sha256"] == hashlib.sha256(content).hexdigest()
    data = DigitsData(domains=("plain",)).load()
    model, (domain,) = config.build(10, class_names=data.class_names), data.domains
    assert (model.num_layers, config.image_size) == (config.depth, 16)
    with torch.no_grad():
        right = model(domain.test.images).argmax(1) == domain.test.labels
    assert len(right) == 359
    assert right.double().mean() > 0.8
