"""The class names, the loss and the checkpoint of scripts/train_tinyimagenet_clip.py."""

import importlib
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from transformers import CLIPModel, CLIPTokenizer

from fedsweep.common.errors import UserError
from fedsweep.models import ClipBackbone
from fedsweep.pretraining.augmentation import ImageAugmentation
from tests.test_yaml_files import WIDTHS

CLASSES = tuple(
    """goldfish, European fire salamander, bullfrog, tailed frog, American alligator, boa constrictor, trilobite,
    scorpion, black widow, tarantula, centipede, goose, koala, jellyfish, brain coral, snail, slug, sea slug,
    American lobster, spiny lobster, black stork, king penguin, albatross, dugong, Chihuahua, Yorkshire terrier,
    golden retriever, Labrador retriever, German shepherd, standard poodle, tabby, Persian cat, Egyptian cat,
    cougar, lion, brown bear, ladybug, fly, bee, grasshopper, walking stick, cockroach, mantis, dragonfly, monarch,
    sulphur butterfly, sea cucumber, guinea pig, hog, ox, bison, bighorn, gazelle, Arabian camel, orangutan,
    chimpanzee, baboon, African elephant, lesser panda, abacus, academic gown, altar, apron, backpack, bannister,
    barbershop, barn, barrel, basketball, bathtub, beach wagon, beacon, beaker, beer bottle, bikini, binoculars,
    birdhouse, bow tie, brass, broom, bucket, bullet train, butcher shop, candle, cannon, cardigan, cash machine, CD
    player, chain, chest, Christmas stocking, cliff dwelling, computer keyboard, confectionery, convertible, crane,
    dam, desk, dining table, drumstick, dumbbell, flagpole, fountain, freight car, frying pan, fur coat, gasmask,
    go-kart, gondola, hourglass, iPod, jinrikisha, kimono, lampshade, lawn mower, lifeboat, limousine, magnetic
    compass, maypole, military uniform, miniskirt, moving van, nail, neck brace, obelisk, oboe, organ, parking
    meter, pay-phone, picket fence, pill bottle, plunger, pole, police van, poncho, pop bottle, potter's wheel,
    projectile, punching bag, reel, refrigerator, remote control, rocking chair, rugby ball, sandal, school bus,
    scoreboard, sewing machine, snorkel, sock, sombrero, space heater, spider web, sports car, steel arch bridge,
    stopwatch, sunglasses, suspension bridge, swimming trunks, syringe, teapot, teddy, thatch, torch, tractor,
    triumphal arch, trolleybus, turnstile, umbrella, vestment, viaduct, volleyball, water jug, water tower, wok,
    wooden spoon, comic book, plate, guacamole, ice cream, ice lolly, pretzel, mashed potato, cauliflower, bell
    pepper, mushroom, orange, lemon, banana, pomegranate, meat loaf, pizza, potpie, espresso, alp, cliff, coral
    reef, lakeside, seashore, acorn""".replace("\n    ", " ").split(", ")
)
"""Tiny-ImageNet's classes, by their names in WordNet."""


@pytest.fixture(scope="module")
def script() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[2] / "scripts"))
        return importlib.import_module("train_tinyimagenet_clip")


@pytest.fixture(scope="module")
def shared(script: ModuleType) -> ModuleType:
    return importlib.import_module("small_clip")


def test_broader_words_are_names_of_existing_classes(script):
    goes = script.matches(CLASSES)
    assert goes.shape == (200, 200 + len(script.BROADER))
    assert goes[:, 200:].sum() == sum(map(len, script.BROADER.values()))
    assert goes[:, 200:].any(1).sum() == 121  # the other classes have no broader word
    names = script.names_of(CLASSES)
    assert [names[i] for i in goes[CLASSES.index("Chihuahua")].nonzero()] == ["Chihuahua", "dog"]
    assert len({name.lower() for name in names}) == len(names)


def test_other_class_names_are_an_error(script):
    with pytest.raises(UserError) as refusal:
        script.matches([name for name in CLASSES if name != "thatch"])
    assert str(refusal.value) == "the classes must have their WordNet names, but no class is named `thatch`."


def test_the_written_checkpoint_is_a_backbone(script, shared, tmp_path):
    captions = script.captions(CLASSES)
    shared.write_vocabulary(tmp_path, captions, script.VOCABULARY)
    tokenizer = CLIPTokenizer.from_pretrained(tmp_path)
    assert len(captions) == len(script.TEMPLATES) * (200 + len(script.BROADER))
    assert max(map(len, tokenizer(captions)["input_ids"])) <= shared.CONTEXT
    assert tokenizer.tokenize("a sketch of a dog") == [f"{word}</w>" for word in ("a", "sketch", "of", "a", "dog")]
    assert tokenizer.decode(tokenizer("a giraffe")["input_ids"], skip_special_tokens=True) == "a giraffe"
    encoder = shared.encoder(width=16, blocks=1, mlp=2, activation="gelu")
    clip = CLIPModel(shared.clip_config(encoder, encoder, 32, 16, 8, tokenizer))
    shared.write_clip(tmp_path, clip, 32)
    recipe = shared.Recipe(1, 2, 1e-3, 0.0, 0.0, 0, ImageAugmentation())
    shared.write_card(tmp_path / "card.json", tmp_path / "model.safetensors", recipe, {"what": "a test"})
    backbone = ClipBackbone(model=str(tmp_path), prompt=script.PROMPT)
    assert (backbone.depth, backbone.width, backbone.image_size) == (1, 16, 32)
    model = backbone.build(2, class_names=("dog", "giraffe"))
    assert model(torch.rand(3, 3, 32, 32)).shape == (3, 2)


def test_the_checkpoint_has_the_feature_width_of_fedags_tables_on_pacs(script):
    assert WIDTHS["pacs"] == script.PROJECTION


def test_the_contrastive_loss_of_pairs_equals_the_loss_of_clip(shared):
    logits = torch.randn(5, 5, generator=torch.Generator().manual_seed(0))
    own = torch.arange(5)
    both = (F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)) / 2
    torch.testing.assert_close(shared.contrast(logits, torch.eye(5), 0.0), both)


def test_captions_of_one_image_share_its_weight_and_unmatched_captions_do_not_count(shared):
    logits = torch.tensor([[1.0, 2.0, 3.0], [0.5, 0.0, -1.0]])
    goes = torch.tensor([[1.0, 0.0, 1.0], [1.0, 0.0, 0.0]])  # no image matches the second caption
    rows, columns = logits.log_softmax(1), logits.log_softmax(0)
    images = -((rows[0, 0] + rows[0, 2]) / 2 + rows[1, 0]) / 2
    texts = -((columns[0, 0] + columns[1, 0]) / 2 + columns[0, 2]) / 2
    torch.testing.assert_close(shared.contrast(logits, goes, 0.0), (images + texts) / 2)


def test_some_images_become_grey_and_some_keep_only_outlines(script):
    generator = torch.Generator().manual_seed(0)
    pixels = torch.rand(400, 3, 8, 8, generator=generator)
    drawn = script.drawn(pixels, generator)
    assert (drawn.clamp(0, 1) == drawn).all()
    changed = (drawn != pixels).flatten(1).any(1)
    assert changed.float().mean().item() == pytest.approx(script.COLOURLESS + script.OUTLINED, abs=0.07)
    assert (drawn[changed] == drawn[changed][:, :1]).all()
    flat = script.drawn(torch.full((400, 3, 8, 8), 0.25), generator)
    white = (flat == 1).flatten(1).all(1)
    assert white.float().mean().item() == pytest.approx(script.OUTLINED, abs=0.06)
    assert flat[~white].sub(0.25).abs().max() < 1e-6
