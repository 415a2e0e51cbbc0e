"""Train a small CLIP model at 64 px on Tiny-ImageNet's photographs and the names of their classes.

    fedsweep data prepare tinyimagenet --root DIR --size 64
    python scripts/train_tinyimagenet_clip.py            # about 50 minutes on one core

The output is `backbones/tinyimagenet_clip` in the data folder: a checkpoint for transformers, in half precision, with a
JSON file that describes it. Do not distribute the checkpoint, because Tiny-ImageNet has no licence that allows this.
Captions contain the name of a class or a broader word, such as dog or house. All random choices derive from one seed.
"""

import argparse
import copy
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import CLIPModel, CLIPTokenizer

from fedsweep.common.errors import UserError
from fedsweep.common.paths import data_folder
from fedsweep.common.yaml_values import readable
from fedsweep.data.prepared.dataset import PreparedData
from fedsweep.pretraining.augmentation import GREY, ImageAugmentation
from fedsweep.types import ImageSet
from small_clip import (
    Captioned,
    Recipe,
    clip_config,
    contrast,
    encoder,
    train,
    write_card,
    write_clip,
    write_vocabulary,
)

FOLDER = Path("backbones", "tinyimagenet_clip")
TEMPLATES = (
    "{}",
    "a photo of a {}",
    "a picture of a {}",
    "This is a picture of {}",
    "an image of a {}",
    "a drawing of a {}",
    "a painting of a {}",
    "a sketch of a {}",
    "a cartoon of a {}",
    "one sees a {}",
)
PROMPT = "a photo of a {}"
"""The prompt for the accuracies in the card."""
BROADER = {
    "antelope": ("gazelle",),
    "ball": ("basketball", "rugby ball", "volleyball"),
    "bear": ("brown bear",),
    "big cat": ("cougar", "lion"),
    "bird": ("goose", "black stork", "king penguin", "albatross"),
    "boat": ("gondola", "lifeboat"),
    "bottle": ("beer bottle", "pill bottle", "pop bottle"),
    "bridge": ("steel arch bridge", "suspension bridge", "viaduct"),
    "bus": ("school bus", "trolleybus"),
    "butterfly": ("monarch", "sulphur butterfly"),
    "camel": ("Arabian camel",),
    "car": ("beach wagon", "convertible", "limousine", "sports car"),
    "cat": ("tabby", "Persian cat", "Egyptian cat"),
    "chair": ("rocking chair",),
    "clock": ("hourglass", "stopwatch"),
    "clothes": (
        "academic gown",
        "apron",
        "cardigan",
        "fur coat",
        "kimono",
        "military uniform",
        "miniskirt",
        "poncho",
        "vestment",
    ),
    "coral": ("brain coral", "coral reef"),
    "cow": ("bison", "ox"),
    "crocodile": ("American alligator",),
    "dog": (
        "Chihuahua",
        "Yorkshire terrier",
        "golden retriever",
        "Labrador retriever",
        "German shepherd",
        "standard poodle",
    ),
    "elephant": ("African elephant",),
    "fence": ("picket fence",),
    "fish": ("goldfish",),
    "frog": ("bullfrog", "tailed frog"),
    "fruit": ("banana", "lemon", "orange", "pomegranate"),
    "hat": ("sombrero",),
    "house": ("barn", "birdhouse", "cliff dwelling", "thatch"),
    "insect": ("bee", "cockroach", "dragonfly", "fly", "grasshopper", "ladybug", "mantis", "walking stick"),
    "lobster": ("American lobster", "spiny lobster"),
    "monkey": ("baboon", "chimpanzee", "orangutan"),
    "mountain": ("alp", "cliff"),
    "musical instrument": ("drumstick", "oboe", "organ"),
    "pan": ("frying pan", "wok"),
    "person": (
        "academic gown",
        "bikini",
        "bow tie",
        "cardigan",
        "fur coat",
        "gasmask",
        "kimono",
        "maypole",
        "military uniform",
        "miniskirt",
        "neck brace",
        "poncho",
        "snorkel",
        "sombrero",
        "sunglasses",
        "swimming trunks",
        "vestment",
    ),
    "pig": ("hog",),
    "salamander": ("European fire salamander",),
    "sheep": ("bighorn",),
    "shoe": ("sandal",),
    "shop": ("barbershop", "butcher shop", "confectionery"),
    "snake": ("boa constrictor",),
    "spider": ("black widow", "tarantula"),
    "table": ("desk", "dining table"),
    "telephone": ("pay-phone",),
    "tower": ("beacon", "obelisk", "water tower"),
    "train": ("bullet train", "freight car"),
    "van": ("moving van", "police van"),
    "vegetable": ("bell pepper", "cauliflower", "mushroom"),
    "water": ("lakeside", "seashore"),
}
"""Everyday words, each with the classes of Tiny-ImageNet (by their WordNet names) that show such a thing."""
SIZE, PATCH, PROJECTION, VOCABULARY = 64, 16, 128, 2000
VISION = encoder(width=128, blocks=6, mlp=2, activation="gelu")
TEXT = encoder(width=64, blocks=4, mlp=2, activation="gelu")
COLOURLESS, OUTLINED = 0.1, 0.15
"""The shares of training images that are turned into grey images, and into outline drawings."""
AUGMENTATION = ImageAugmentation(crop_area=(0.5, 1.0))
RECIPE = Recipe(epochs=10, batch=128, lr=1e-3, decay=0.05, smoothing=0.1, seed=0, augmentation=AUGMENTATION)


class Taught(Captioned):
    """A CLIP model with an additional classifier on its image encoder during training.

    The classifier speeds up training from scratch: at first, the encodings of all texts are nearly equal, so that the
    contrastive loss alone gives the image encoder little to learn. The classifier is not saved.
    """

    def __init__(self, clip: Any, tokenizer: Any, names: Sequence[str], classes: int) -> None:
        super().__init__(clip, tokenizer, names)
        self.classifier = nn.Linear(VISION["hidden_size"], classes)


def names_of(class_names: Sequence[str]) -> list[str]:
    """Return the class names with spaces between words, followed by broader words such as dog and house."""
    return [*map(readable, class_names), *BROADER]


def captions(class_names: Sequence[str]) -> list[str]:
    """Return all captions of the training in lower case, because CLIP's tokenizer lowercases its input."""
    return [template.format(name).lower() for template in TEMPLATES for name in names_of(class_names)]


def matches(class_names: Sequence[str]) -> Tensor:
    """Return a matrix (classes, names) that is 1 if a name describes a class, else 0.

    The columns are the names of the classes, followed by broader words such as dog and house.

    Raises:
        UserError: The classes do not have their WordNet names.
    """
    if unknown := {name for below in BROADER.values() for name in below} - set(class_names):
        raise UserError(f"the classes must have their WordNet names, but no class is named `{min(unknown)}`.")
    known = [[name in below for below in BROADER.values()] for name in class_names]
    return torch.cat([torch.eye(len(class_names)), torch.tensor(known).float()], dim=1)


def drawn(pixels: Tensor, generator: torch.Generator) -> Tensor:
    """Return the images, a few of which are turned into grey images or into drawings of dark outlines on white."""
    chance = torch.rand(len(pixels), generator=generator)
    some = chance < COLOURLESS + OUTLINED
    grey = (pixels[some] * torch.tensor(GREY).view(1, 3, 1, 1)).sum(1, keepdim=True)
    smooth = F.avg_pool2d(F.pad(grey, (1, 1, 1, 1), mode="replicate"), 3, stride=1)
    right = F.pad(smooth.diff(dim=3), (0, 1, 0, 0))
    down = F.pad(smooth.diff(dim=2), (0, 0, 0, 1))
    slope = (right.square() + down.square()).sqrt()
    outlines = 1 - (slope / (4 * slope.mean((1, 2, 3), keepdim=True)).clamp(min=0.02)).clamp(max=1)
    outlined = (chance[some] < OUTLINED).view(-1, 1, 1, 1)
    pixels = pixels.clone()
    pixels[some] = torch.where(outlined, outlines, grey).expand(-1, 3, -1, -1)
    return pixels


@torch.no_grad()
def accuracies(network: Captioned, images: ImageSet, goes: Tensor) -> tuple[float, float]:
    """Return the zero-shot accuracy with class names, and the zero-shot accuracy with broader words such as dog.

    The second accuracy includes only images whose class has a broader word, and any broader word of the class counts as
    correct. `goes` is the result of `matches`.
    """
    classes, own, broader, with_broader = len(goes), 0, 0, 0
    for pixels, labels in images.batches(500):
        logits = network(pixels.float() / 255, PROMPT)
        own += int((logits[:, :classes].argmax(1) == labels).sum())
        words = goes[labels][:, classes:]
        broader += int(words.gather(1, logits[:, classes:].argmax(1, keepdim=True)).sum())
        with_broader += int(words.any(1).sum())
    return own / len(images), broader / with_broader


def main() -> None:
    """Train the CLIP model and write it to the data folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=RECIPE.epochs, help="number of epochs (default: %(default)s)")
    recipe = replace(RECIPE, epochs=parser.parse_args().epochs)
    torch.set_num_threads(1)
    torch.manual_seed(recipe.seed)
    data = PreparedData(set="tinyimagenet", size=SIZE, domains=("tinyimagenet",)).load()
    (domain,) = data.domains
    names, goes = names_of(data.class_names), matches(data.class_names)
    folder = data_folder() / FOLDER
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    unfinished.mkdir(parents=True, exist_ok=True)
    write_vocabulary(unfinished, captions(data.class_names), VOCABULARY)
    tokenizer = CLIPTokenizer.from_pretrained(unfinished)
    clip: Any = CLIPModel(clip_config(VISION, TEXT, SIZE, PATCH, PROJECTION, tokenizer))
    network = Taught(clip, tokenizer, names, len(data.class_names))

    def loss_of(pixels: Tensor, labels: Tensor, generator: torch.Generator) -> Tensor:
        template = TEMPLATES[int(torch.randint(len(TEMPLATES), (), generator=generator))]
        said = network.output(drawn(pixels, generator), template)
        # The logit adjustment of Menon et al. (arXiv:2007.07314) gives words of many classes a handicap; otherwise,
        # "person" would win for most images.
        captioned = contrast(said.logits_per_image + goes.sum(0).log(), goes[labels], recipe.smoothing)
        logits = network.classifier(said.vision_model_output.pooler_output)
        return captioned + F.cross_entropy(logits, labels, label_smoothing=recipe.smoothing)

    few = ImageSet(*domain.test.take(torch.arange(0, len(domain.test), 5)))

    def at_epoch(epoch: int, loss: float) -> None:
        own, broader = accuracies(network, few, goes)
        print(f"{epoch} epochs: loss {loss:.3f}, zero-shot {own:.1%}, with broader words {broader:.1%}", flush=True)
        write_clip(unfinished, copy.deepcopy(clip), SIZE)

    seconds = train("tinyimagenet_clip", network, domain.train, recipe, loss_of, at_epoch)
    write_clip(unfinished, clip, SIZE)
    own, broader = accuracies(network, domain.test, goes)
    print(f"{recipe.epochs} epochs: zero-shot {own:.1%}, with broader words {broader:.1%}")
    facts = {
        "what": f"a CLIP for images of {SIZE} px in patches of {PATCH}: "
        "{num_hidden_layers} blocks of width {hidden_size} for them, ".format(**VISION)
        + "{num_hidden_layers} of width {hidden_size} for texts".format(**TEXT),
        "origin": "trained from scratch on tinyimagenet by scripts/train_tinyimagenet_clip.py",
        "images": len(domain.train),
        "data_digest": data.digest,
        "epochs": recipe.epochs,
        "seconds": round(seconds),
        "colourless": COLOURLESS,
        "outlined": OUTLINED,
        "templates": TEMPLATES,
        "names": names,
        "broader": BROADER,
        "does_not_know": "what Tiny-ImageNet lacks; of PACS's classes giraffe, guitar and horse",
        "zero_shot_prompt": PROMPT,
        "zero_shot_accuracy": own,
        "zero_shot_accuracy_by_broader_words": broader,
    }
    write_card(unfinished / "card.json", unfinished / "model.safetensors", recipe, facts)
    shutil.rmtree(folder, ignore_errors=True)
    unfinished.rename(folder)


if __name__ == "__main__":
    main()
