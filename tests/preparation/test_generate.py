"""The images, the resumption and the errors of `fedsweep data generate` with a very small real pipeline."""

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fedsweep.common.errors import UserError
from fedsweep.common.yaml_values import read_yaml
from fedsweep.data.data_config import load
from fedsweep.federation.build_and_run import content_digests, run, split
from fedsweep.federation.run_config import RunConfig
from fedsweep.preparation.generate import Generation, generate, plan_generation, prepare_generated
from fedsweep.preparation.text_to_image import TextToImage
from tests.pipelines import write_embedding, write_pipeline

EXPERIMENT = Path(__file__).parents[2] / "experiments" / "fedag_digits.yaml"
DATA = {"data.domains": ["plain", "inverted", "noisy"], "data.held_out_domains": ["noisy"], "data.test_fraction": 0.9}
STYLES = {"plain": "white on black", "inverted": "black on white"}
SHARE = 0.0625  # 11 of 180 training images, for ten classes


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pipeline(tmp_path_factory.mktemp("pipeline"))


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Use an empty folder as the data folder, and return it."""
    monkeypatch.setenv("FEDSWEEP_DATA", str(tmp_path / "data"))
    return tmp_path / "data"


def config(model: Path | str, changes: dict[str, Any] | None = None, **synthetic: Any) -> RunConfig:
    """Return an experiment with generated images, two training domains of digits and a held-out domain."""
    given = {"name": "diffusers", "model": str(model), "share": SHARE, "num_inference_steps": 1}
    given |= {"template": "the digit {class}, {style}", "styles": STYLES} | synthetic
    experiment = RunConfig.of(read_yaml(EXPERIMENT), "test")
    return experiment.override({**DATA, "synthetic": given, **(changes or {})}, "test")


def planned(*arguments: Any, **synthetic: Any) -> Generation:
    return plan_generation(config(*arguments, **synthetic))


def digests(generation: Generation) -> dict[str, str]:
    """Return the SHA-256 of every generated image by its path in the folder."""
    found = sorted(generation.folder.rglob("*.png"))
    return {
        one.relative_to(generation.folder).as_posix(): hashlib.sha256(one.read_bytes()).hexdigest() for one in found
    }


@pytest.fixture(scope="module")
def whole(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the digests of the images of an uninterrupted generation, keyed by path."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDSWEEP_DATA", str(tmp_path_factory.mktemp("data")))
        generation = planned(model)
        assert generate(generation) == 22
        return digests(generation)


def test_each_class_of_each_training_domain_gets_its_share(whole):
    assert len(whole) == len(set(whole.values())) == 22
    expected = {f"{domain}/{digit}/00000.png" for domain in STYLES for digit in range(10)}
    assert set(whole) == expected | {f"{domain}/0/00001.png" for domain in STYLES}


def test_an_interrupted_generation_continues_with_identical_images(model, home, whole, monkeypatch):
    made, paint = [], TextToImage.png

    def stop(self: TextToImage, prompt: str, generator: torch.Generator) -> bytes:
        if len(made) == 3:
            raise KeyboardInterrupt
        made.append(prompt)
        return paint(self, prompt, generator)

    generation = planned(model)
    with monkeypatch.context() as patch:
        patch.setattr(TextToImage, "png", stop)
        with pytest.raises(KeyboardInterrupt):
            generate(generation)
    assert len(digests(generation)) == 3
    assert made == ["the digit 0, white on black"] * 2 + ["the digit 1, white on black"]
    (generation.folder / "plain/0/00000.png").unlink()
    told: list[tuple[int, int]] = []
    assert generate(generation, progress=lambda done, total: told.append((done, total))) == 20
    assert told == [(done, 22) for done in range(2, 23)]
    assert digests(generation) == whole


def test_a_larger_share_only_adds_images(model, home, whole, monkeypatch):
    small, large = planned(model), planned(model, share=2 * SHARE)
    assert small.folder == large.folder
    monkeypatch.setattr(TextToImage, "png", lambda *_: small_png(generator=_[2]))
    assert generate(small) == 22
    first = prepare_generated(small).card
    before = digests(small)
    assert generate(large) == 22
    after = digests(large)
    assert (len(after), before.items() <= after.items()) == (44, True)
    second = prepare_generated(large)
    assert (first.images, second.card.images) == (22, 44)
    assert not second.already
    assert prepare_generated(large).already
    assert generate(small) == 0


def small_png(generator: torch.Generator) -> bytes:
    """Return a PNG file of random pixels in place of an image of a text-to-image pipeline."""
    import io

    pixels = torch.randint(256, (20, 16, 3), dtype=torch.uint8, generator=generator).numpy()
    Image.fromarray(pixels).save(file := io.BytesIO(), "png")
    return file.getvalue()


def test_the_model_is_not_loaded_if_all_images_exist(model, home, monkeypatch):
    monkeypatch.setattr(TextToImage, "png", lambda *_: small_png(generator=_[2]))
    generation = planned(model)
    generate(generation)
    monkeypatch.setitem(sys.modules, "diffusers", None)
    assert generate(generation) == 0


def test_an_image_does_not_depend_on_earlier_images(model, home, whole):
    synthetic = config(model).synthetic
    painter = TextToImage(synthetic)
    for path in reversed(list(whole)[::7]):
        domain, digit, file = path.split("/")
        number = int(file.removesuffix(".png"))
        png = painter.png(synthetic.prompt(domain, digit), synthetic.generator(domain, digit, number))
        assert hashlib.sha256(png).hexdigest() == whole[path]


def test_another_recipe_has_another_folder_and_other_images(model, home, whole):
    first = config(model)
    data = load(first.data)
    assert config(model, share=0.5).synthetic.set_name(data) == first.synthetic.set_name(data)
    painter = TextToImage(first.synthetic)
    for changes in ({"seed": 1}, {"num_inference_steps": 3}, {"guidance_scale": 1.5}):
        synthetic = painter.config = config(model, **changes).synthetic
        assert synthetic.set_name(data) != first.synthetic.set_name(data)
        png = painter.png(synthetic.prompt("plain", "0"), synthetic.generator("plain", "0", 0))
        assert hashlib.sha256(png).hexdigest() != whole["plain/0/00000.png"]


def test_images_have_the_requested_size(model, home):
    synthetic = config(model, image_size=48).synthetic
    png = TextToImage(synthetic).png("a digit", synthetic.generator("plain", "0", 0))
    (home.parent / "one.png").write_bytes(png)
    with Image.open(home.parent / "one.png") as image:
        assert (image.size, image.mode) == ((48, 48), "RGB")
        assert np.asarray(image).std() > 5


def test_class_names_are_separate_words_in_the_prompt(model):
    synthetic = config(model).synthetic
    assert synthetic.prompt("plain", "ApplyEyeMakeup") == "the digit Apply Eye Makeup, white on black"
    assert synthetic.prompt("inverted", "apple_pie") == "the digit apple pie, black on white"
    bare = config(model, template="{class}!", styles={}).synthetic
    assert bare.prompt("plain", "7") == "7!"


def test_a_learned_token_changes_the_images(model, home):
    """The token may have one or several vectors. Images of prompts without the token do not change."""
    styles = {"plain": "<art>", "inverted": "<art>"}
    plain = TextToImage(config(model, styles=styles).synthetic)
    prompt = plain.config.prompt("plain", "0")
    assert prompt == "the digit 0, <art>"

    def png(painter: TextToImage, prompt: str) -> bytes:
        return painter.png(prompt, painter.config.generator("plain", "0", 0))

    made = [png(plain, prompt)]
    for number, (vectors, seed) in enumerate([(3, 5), (1, 5)]):
        file = write_embedding(home.parent / f"{number}.safetensors", vectors, seed=seed)
        learned = TextToImage(config(model, styles=styles, embeddings={"plain": str(file)}).synthetic)
        made.append(png(learned, prompt))
    assert len(set(made)) == 3
    assert png(learned, "the digit 0") == png(plain, "the digit 0")


def test_a_run_trains_on_the_images(model, home, monkeypatch):
    few = {"federation.rounds": 1, "local.steps": 1, "method.server.epochs": 1, "method.server.warmup_epochs": 1}
    asked = config(model, few, share=2 * SHARE)
    with pytest.raises(
        UserError, match=r"^`synthetic` diffusers: the images are not generated yet; run `fedsweep data gen"
    ):
        split(asked)
    with pytest.raises(UserError, match=r"not generated yet"):
        content_digests(asked)
    monkeypatch.setattr(TextToImage, "png", lambda *_: small_png(generator=_[2]))
    generate(planned(model))
    prepared = prepare_generated(planned(model))
    with pytest.raises(UserError) as refused:
        split(asked)
    assert str(refused.value) == (
        "`synthetic` diffusers must have 3 images of `0` in plain for a `synthetic.share` of 0.125, but it has 2; "
        "run `fedsweep data generate EXPERIMENT` to generate the others."
    )
    asked = asked.override({"synthetic.share": SHARE}, "test")
    assert content_digests(asked)["data"].endswith(f" {prepared.card.digest}")
    _, parts = split(asked)
    assert {name: len(images) for name, images in parts.synthetic.items()} == {"plain": 11, "inverted": 11}
    images, labels = parts.synthetic["plain"].take(torch.arange(11))
    assert images.shape == (11, 3, 16, 16)
    assert sorted(labels.tolist()) == [0, *range(10)]
    results = list(run(asked))
    assert [one.round for one in results] == [0, 1]
    assert all(np.isfinite(value) for value in results[-1].metrics.values())


def test_a_domain_that_was_held_out_during_generation_is_reported_as_missing(model, home, monkeypatch):
    monkeypatch.setattr(TextToImage, "png", lambda *_: small_png(generator=_[2]))
    styles = {**STYLES, "noisy": "white noise"}
    generate(planned(model, styles=styles))
    prepare_generated(planned(model, styles=styles))
    split(config(model, styles=styles))
    with pytest.raises(UserError) as refused:
        split(config(model, {"data.held_out_domains": ["plain"]}, styles=styles))
    assert str(refused.value) == (
        "`synthetic` diffusers: the images of noisy are not generated yet; run `fedsweep data generate EXPERIMENT` "
        "to generate them."
    )


def refused(*arguments: Any, **synthetic: Any) -> str:
    with pytest.raises(UserError) as refusal:
        generate(planned(*arguments, **synthetic))
    assert not list(Path(planned(*arguments, **synthetic).folder).rglob("*.png"))
    return str(refusal.value)


def test_without_diffusers_there_is_an_error_in_one_sentence(model, home, monkeypatch):
    monkeypatch.setitem(sys.modules, "diffusers", None)
    assert refused(model) == (
        "`fedsweep data generate` needs diffusers; `pip install fedsweep[diffusers]` installs it."
    )


def test_a_missing_checkpoint_is_an_error(home, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    sentence = refused("nobody/no-such-model")
    assert sentence.startswith(
        "`synthetic.model` nobody/no-such-model is neither a folder nor in Hugging Face's cache and"
    )
    (home / "empty").mkdir(parents=True)
    assert refused("empty") == f"`synthetic.model` empty is a folder without model_index.json ({home / 'empty'})."
    (home / "empty" / "model_index.json").write_text("{}")
    assert refused("empty").startswith("`synthetic.model` empty cannot be loaded: ")


def test_another_kind_of_pipeline_is_rejected(home, tmp_path):
    from diffusers import DDPMPipeline, DDPMScheduler, UNet2DModel

    unet = UNet2DModel(
        sample_size=8,
        block_out_channels=(4, 4),
        layers_per_block=1,
        norm_num_groups=2,
        attention_head_dim=2,
        down_block_types=("DownBlock2D",) * 2,
        up_block_types=("UpBlock2D",) * 2,
    )
    DDPMPipeline(unet, DDPMScheduler()).save_pretrained(tmp_path / "ddpm")
    assert "must be a text-to-image pipeline, but its DDPMPipeline has no parameter" in refused(tmp_path / "ddpm")


def test_an_embedding_that_is_missing_or_does_not_fit_is_rejected(model, home, tmp_path):
    styles = {"plain": "<art>", "inverted": "bright"}
    nowhere = refused(model, styles=styles, embeddings={"plain": "nowhere.safetensors"})
    assert nowhere.startswith("`synthetic.embeddings` nowhere.safetensors does not exist (looked for ")
    wide = write_embedding(tmp_path / "wide.safetensors", width=17)
    assert f"{wide} cannot be loaded as `<art>` of" in refused(model, styles=styles, embeddings={"plain": str(wide)})


def test_a_prompt_that_is_too_long_is_an_error(model, home):
    sentence = refused(model, template="an abominable hieroglyph of xylophones that says {class}", styles={})
    assert sentence.startswith(
        "a prompt must have at most 32 tokens, but `an abominable hieroglyph of xylophones that says 0` has "
    )


def test_another_model_under_the_same_name_is_noticed(home, tmp_path, monkeypatch):
    own = write_pipeline(tmp_path / "own")
    generation = planned(own)
    with monkeypatch.context() as patch:
        patch.setattr(TextToImage, "png", lambda *_: small_png(generator=_[2]))
        generate(generation)
    noted = json.loads((generation.folder / "recipe.json").read_text())
    assert noted["prompts"] == ["the digit 0, white on black", "the digit 0, black on white"]
    (generation.folder / "plain/3/00000.png").unlink()
    write_pipeline(own, seed=1)
    with pytest.raises(UserError, match=r"were generated with other files of `synthetic.model`"):
        generate(generation)


def test_a_share_that_cannot_be_prepared_is_rejected(model, home):
    with pytest.raises(UserError) as refusal:
        planned(model, share=0.05)
    assert str(refusal.value) == (
        "`synthetic.share` must give at least one class of each domain two images, but 0.05 gives the domain plain "
        "only 9 for 10 classes."
    )


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"template": "a digit"}, "`synthetic.template` must contain {class} once, {style} at most once and no other"),
        ({"template": "{class} {class} {style}"}, "must contain {class} once"),
        ({"template": "{class} {style} {"}, "no other braces, but it is `{class} {style} {`"),
        ({"template": "{class} of {domain}"}, "no other braces"),
        (
            {"template": "{class}"},
            "`synthetic.styles` needs {style} in `synthetic.template`, but the template is `{class}`",
        ),
        ({"styles": {"plain": "grey"}}, "for every domain of the clients, but has none for inverted"),
        ({"styles": STYLES | {"plane": "x"}}, "`plane`, which is not a domain of the data; did you mean `plain`?"),
        ({"embeddings": {"noisy": "a.bin"}}, "`synthetic.embeddings` for noisy, a single word, but it is null"),
        ({"embeddings": {"plain": "a.bin"}}, 'for plain, a single word, but it is "white on black"'),
        (
            {"styles": {"plain": "<a>", "inverted": "<a>"}, "embeddings": {"plain": "a.bin", "inverted": "b.bin"}},
            "one file for each token, but `<a>` has a.bin and b.bin",
        ),
        ({"image_size": 20}, "must be a multiple of 8"),
        ({"num_inference_steps": 0}, "`synthetic.num_inference_steps`"),
    ],
)
def test_an_invalid_recipe_is_an_error(changes, sentence):
    with pytest.raises(UserError) as refusal:
        config("any", **changes)
    assert sentence in str(refusal.value)


def test_styles_may_include_a_held_out_domain():
    assert config("any", styles=STYLES | {"noisy": "grainy"}).synthetic.styles["noisy"] == "grainy"


def test_another_source_of_synthetic_images_is_an_error(home):
    surrogate = RunConfig.of(read_yaml(EXPERIMENT), "test")
    with pytest.raises(UserError) as refusal:
        plan_generation(surrogate)
    assert str(refusal.value) == (
        "`synthetic.name` must be diffusers for `fedsweep data generate`, but it is surrogate."
    )
