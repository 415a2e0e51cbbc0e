"""Functions that generate images with a text-to-image model (`synthetic: {name: diffusers}`) and prepare them.

Images are written to `generated/<set>/<domain>/<class>/<number>.png` in the data folder, where `<set>` is the name of
the prepared data set that will contain the images. An image depends only on its domain, its class, its number and the
recipe. The recipe consists of all options of `synthetic` except `share`. Experiments that differ only in `share` use
the same folder, so increasing `share` only adds images.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from fedsweep.common.errors import UserError
from fedsweep.common.files import locked, write_atomically
from fedsweep.common.paths import data_folder
from fedsweep.common.yaml_values import read_json
from fedsweep.data.data_config import load
from fedsweep.data.prepared.card import is_store, read_card
from fedsweep.data.synthetic.generated import Diffusers, size_of
from fedsweep.federation.run_config import RunConfig
from fedsweep.preparation.layouts.folders import Domains
from fedsweep.preparation.plan import Options, Progress, make_plan
from fedsweep.preparation.prepare import CHUNK, Prepared, prepare
from fedsweep.preparation.text_to_image import TextToImage
from fedsweep.types import FederatedData

RECIPE = "recipe.json"


@dataclass(frozen=True)
class Wanted:
    """An image that an experiment needs from a text-to-image model, and the path of its file."""

    domain: str
    class_name: str
    number: int
    path: Path


@dataclass(frozen=True)
class Generation:
    """All images that an experiment needs from a text-to-image model."""

    config: Diffusers
    data: FederatedData
    folder: Path
    images: tuple[Wanted, ...]

    @property
    def missing(self) -> list[Wanted]:
        """The images whose files do not exist yet."""
        return [one for one in self.images if not one.path.is_file()]


def plan_generation(config: RunConfig) -> Generation:
    """Return the images that an experiment needs from a text-to-image model.

    Raises:
        UserError: `synthetic.name` is not diffusers, `synthetic.share` is too small, or the name of a domain or class
            cannot be the name of a folder.
    """
    synthetic = config.synthetic
    if not isinstance(synthetic, Diffusers):
        raise UserError(f"`synthetic.name` must be diffusers for `fedsweep data generate`, but it is {synthetic.name}.")
    data = load(config.data)
    for name in (*(one.name for one in data.domains), *data.class_names):
        if "/" in name or name.startswith(".") or name == "__MACOSX":
            raise UserError(
                f"the domains and classes of {data.name} must have names that a folder can have, but one is `{name}`."
            )
    folder = data_folder() / "generated" / synthetic.set_name(data)
    images = []
    for domain in data.domains:
        wanted = synthetic.wanted(domain, data.class_names)
        if max(wanted) < 2:  # the preparation divides a class into training and test images
            raise UserError(
                f"`synthetic.share` must give at least one class of each domain two images, but {synthetic.share:g} "
                f"gives the domain {domain.name} only {sum(wanted)} for {len(wanted)} classes."
            )
        for class_name, count in zip(data.class_names, wanted, strict=True):
            place = folder / domain.name / class_name
            images += [Wanted(domain.name, class_name, one, place / f"{one:05d}.png") for one in range(count)]
    return Generation(synthetic, data, folder, tuple(images))


def generate(generation: Generation, device: str = "cpu", progress: Progress = lambda done, total: None) -> int:
    """Generate the missing images one by one, and return the number of newly generated images.

    Args:
        generation: All images that the experiment needs.
        device: The device that runs the text-to-image model, cpu or cuda.
        progress: A function that is called with the number of existing images and the total number of images.

    Raises:
        UserError: The model is missing or has changed, a prompt is too long, another process is generating the same
            images, or the disk is full.
    """
    config, folder = generation.config, generation.folder
    if not generation.missing:
        return 0
    model = TextToImage(config, device)
    model.check(list(dict.fromkeys(config.prompt(one.domain, one.class_name) for one in generation.images)))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder.with_name(f".{folder.name}.lock"), f"another process is generating {folder} now."):
            _check_recipe(generation, model.content(), model.library.__version__)
            missing, total = generation.missing, len(generation.images)
            progress(total - len(missing), total)
            for done, one in enumerate(missing, total - len(missing) + 1):
                prompt = config.prompt(one.domain, one.class_name)
                write_atomically(one.path, model.png(prompt, config.generator(one.domain, one.class_name, one.number)))
                progress(done, total)
            return len(missing)
    except OSError as error:  # such as a full disk; existing images are complete, because writes are atomic
        raise UserError(f"{folder} cannot be written: {error.strerror or error}.") from None


def prepare_generated(
    generation: Generation,
    workers: int = 1,
    progress: Progress = lambda done, total: None,
    compared: Progress = lambda done, total: None,
) -> Prepared:
    """Prepare the generated images at the image size of the experiment's data set, with up to `workers` processes.

    `progress` is called with the number of decoded images, and `compared` with the number of images that have been
    compared with the others, to find copies. Both are also called with the total number of images.

    All images are prepared again if any were added since the last preparation. Raise UserError in the same cases as
    `prepare`.
    """
    options = Options(generation.folder.name, size_of(generation.data), Domains.name)
    plan = make_plan(options, generation.folder, Domains())
    card = read_card(plan.folder) if is_store(plan.folder) else None
    older = card is not None and (card.plan, card.times) != (plan.key(), plan.times())
    busy = min(workers, 1 + len(plan.listing.items) // CHUNK)
    return prepare(plan, busy, force=older, progress=progress, compared=compared)


def _check_recipe(generation: Generation, content: dict[str, str], library: str) -> None:
    """Check that all images in the folder are generated with the same model files and embedding files.

    `content` contains the digests of these files. The first call writes a recipe file into the folder, with `content`
    and the diffusers version `library`. A later call raises UserError if `content` differs from the recipe file.
    """
    path = generation.folder / RECIPE
    if path.is_file():
        if read_json(path).get("content") != content:
            raise UserError(
                f"the images in {generation.folder} were generated with other files of `synthetic.model` or "
                "`synthetic.embeddings`; move the folder away to generate all images again."
            )
        return
    config, data = generation.config, generation.data
    recipe = config.model_dump(mode="json", exclude={"share"})
    prompts = [config.prompt(domain.name, data.class_names[0]) for domain in data.domains]  # a sample for readers
    record = {"recipe": recipe, "content": content, "diffusers": library, "prompts": prompts}
    write_atomically(path, (json.dumps(record, indent=2, ensure_ascii=False) + "\n").encode())
