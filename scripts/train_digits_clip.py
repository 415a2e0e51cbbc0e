"""Train the small networks that fedsweep includes on MNIST digits: CLIP models, and the ResNet in FedMS's gate.

    fedsweep data prepare mnist --root DIR --size 16     # DIR: a folder with mnist.parquet
    python scripts/train_digits_clip.py base             # or patch8, large, trunk; 10 to 30 minutes each on one core

All random choices derive from one seed. Training images are augmented as in `fedsweep pretrain digits_vit`. No training
image belongs to a domain of the experiments. The weights are written in half precision, with a JSON file that describes
them. The CLIP models are checkpoints for transformers.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import CLIPModel, CLIPTokenizer

from fedsweep.data.prepared.dataset import PreparedData
from fedsweep.methods.fedms.trunk import WEIGHTS as TRUNK
from fedsweep.methods.fedms.trunk import DigitsTrunk
from fedsweep.pretraining.augmentation import GlyphAugmentation
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

WEIGHTS = Path(__file__).parents[1] / "fedsweep" / "models" / "weights"
WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
TEMPLATES = (
    "{}",
    "a photo of a {}",
    "an image of the digit {}",
    "the number {}",
    "this is a picture of {}",
    "a drawing of a {}",
    "a handwritten {}",
    "a {} on some background",
    "the digit {}, written by hand",
    "somebody wrote the number {}",
    "{} as a picture",
    "one sees a {}",
)
SHAPES = {
    "base": {"width": 64, "blocks": 6, "patch": 4},
    "patch8": {"width": 64, "blocks": 6, "patch": 8},
    "large": {"width": 96, "blocks": 8, "patch": 4},
}
NAMES = [*map(str, range(10)), *WORDS]
"""Two names for each digit: its numeral and its word."""
VOCABULARY = 700
EPOCHS = {"base": 60, "patch8": 60, "large": 45, "trunk": 25}


def recipe(what: str) -> Recipe:
    """Return the hyperparameters for training the network `what`: `base`, `patch8`, `large` or `trunk`."""
    augmentation = GlyphAugmentation(bold=1.4)
    return Recipe(EPOCHS[what], batch=128, lr=1e-3, decay=0.05, smoothing=0.1, seed=0, augmentation=augmentation)


@torch.inference_mode()
def accuracy(network: nn.Module, images: ImageSet) -> float:
    """Return the accuracy on a set of images. A CLIP model is tested zero-shot, with numerals in a prompt."""
    right = 0
    for pixels, labels in images.batches(500):
        if isinstance(network, Captioned):
            logits = network(pixels.float() / 255, "This is a picture of {}")[:, :10]
        else:
            logits = network((pixels.float() / 255 - 0.5) / 0.5)
        right += int((logits.argmax(1) == labels).sum())
    return right / len(images)


def main() -> None:
    """Train the network given on the command line, and write it to the package's folder of weights."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=EPOCHS)
    what = parser.parse_args().what
    torch.set_num_threads(1)
    how = recipe(what)
    torch.manual_seed(how.seed)
    data = PreparedData(set="mnist", size=16, domains=("mnist",)).load()
    (domain,) = data.domains
    facts: dict[str, Any] = {"images": len(domain.train), "data_digest": data.digest, "epochs": how.epochs}
    origin = {"origin": "trained from scratch on mnist (LeCun, Cortes and Burges) by scripts/train_digits_clip.py"}

    def at_epoch(epoch: int, loss: float) -> None:
        print(what, epoch, round(loss, 4), flush=True)

    if what == "trunk":
        trunk: Any = DigitsTrunk().outlined()
        trunk.reset_classifier(10)

        def of_classes(pixels: Tensor, labels: Tensor, generator: torch.Generator) -> Tensor:
            return F.cross_entropy(trunk((pixels - 0.5) / 0.5), labels, label_smoothing=how.smoothing)

        seconds = train(what, trunk, domain.train, how, of_classes, at_epoch)
        facts |= {"seconds": round(seconds), "accuracy": accuracy(trunk, domain.test)}
        trunk.reset_classifier(0)
        tensors = {key: one.half() if one.is_floating_point() else one for key, one in trunk.state_dict().items()}
        save_file(tensors, TRUNK)
        facts |= {"what": "ResNet-18 of channels 16, 32, 64, 64 at 16 px, without its classifier"}
        write_card(TRUNK.with_suffix(".json"), TRUNK, how, facts | origin)
        return
    folder = WEIGHTS / ("digits_clip" if what == "base" else f"digits_clip_{what}")
    folder.mkdir(parents=True, exist_ok=True)
    write_vocabulary(folder, [template.format(name) for template in TEMPLATES for name in NAMES], VOCABULARY)
    tokenizer = CLIPTokenizer.from_pretrained(folder)
    shape = SHAPES[what]
    both = encoder(shape["width"], shape["blocks"], mlp=2)
    network = Captioned(CLIPModel(clip_config(both, both, 16, shape["patch"], 64, tokenizer)), tokenizer, NAMES)

    def of_captions(pixels: Tensor, labels: Tensor, generator: torch.Generator) -> Tensor:
        template = TEMPLATES[int(torch.randint(len(TEMPLATES), (), generator=generator))]
        matches = torch.cat([F.one_hot(labels, 10)] * 2, dim=1).float()
        return contrast(network(pixels, template), matches, how.smoothing)

    facts |= {"seconds": round(train(what, network, domain.train, how, of_captions, at_epoch))}
    write_clip(folder, network.clip, 16)
    facts |= {
        "what": "a CLIP of {blocks} blocks and width {width} in each encoder, patches of {patch} px".format(
            **SHAPES[what]
        ),
        "templates": TEMPLATES,
        "names": NAMES,
        "zero_shot_accuracy": accuracy(network, domain.test),
    }
    write_card(folder / "card.json", folder / "model.safetensors", how, facts | origin)


if __name__ == "__main__":
    main()
