"""Generation of the missing images of `synthetic: {name: diffusers}`, and preparation of all.

Images lie in the data folder, `generated/SET/<domain>/<class>/<number>.png`, and depend on the recipe, domain, class
and number only. All shares of a recipe have the same folder: a larger share adds images to it.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import io
import json
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from fedsweep.common.errors import UserError, one_line
from fedsweep.common.files import locked, write_atomically
from fedsweep.common.paths import data_folder, resolve
from fedsweep.common.yaml_values import read_json
from fedsweep.data.data_config import load
from fedsweep.data.prepared.card import is_store, read_card
from fedsweep.data.synthetic.generated import Diffusers, size_of
from fedsweep.federation.run_config import RunConfig
from fedsweep.preparation.layouts.folders import Domains
from fedsweep.preparation.plan import Options, make_plan
from fedsweep.preparation.prepare import CHUNK, Prepared, Progress, prepare
from fedsweep.types import FederatedData

INDEX = "model_index.json"
ASKED = {"prompt", "height", "width", "num_inference_steps", "guidance_scale", "generator", "output_type"}
"""Parameters that a pipeline must have."""


class TextToImage:
    """A pipeline without a safety checker, in half precision on a GPU, in single precision on a CPU.

    To make it raises UserError if diffusers, the checkpoint or an embedding is missing or cannot be read.
    """

    def __init__(self, config: Diffusers, device: str = "cpu") -> None:
        self.config = config
        self.library = _library()
        self.folder = self._find()
        self.embeddings: dict[str, Path] = {}
        for domain, name in config.embeddings.items():
            path = self.embeddings[config.styles[domain]] = resolve(name)
            if not path.is_file():
                raise UserError(f"`synthetic.embeddings` {name} is not there (looked for {path}).")
        self.pipeline: Any = self._load(torch.float16 if device == "cuda" else torch.float32).to(device)
        for token, path in self.embeddings.items():
            whole = f"`synthetic.embeddings` {path} cannot be loaded as `{token}` of `synthetic.model` {config.model}"
            with _told(whole):
                self.pipeline.load_textual_inversion(str(path), token=token, local_files_only=True)

    def content(self) -> dict[str, str]:
        """Return the identity of the model and of each embedding: the hub's commit or a SHA-256."""
        if self.folder.parent.name == "snapshots":  # the hub's cache names folders after the commit
            model = self.folder.name
        else:
            digest = hashlib.sha256()
            for path in sorted(one for one in self.folder.rglob("*") if one.is_file() and not one.name.startswith(".")):
                digest.update(f"{path.relative_to(self.folder).as_posix()}\0{_digest(path)}\0".encode())
            model = digest.hexdigest()
        return {"model": model, **{token: _digest(path) for token, path in sorted(self.embeddings.items())}}

    def check(self, prompts: Sequence[str]) -> None:
        """Raise UserError if a prompt has more tokens than the text encoder reads."""
        tokenizer: Any = getattr(self.pipeline, "tokenizer", None)
        convert: Any = getattr(self.pipeline, "maybe_convert_prompt", None)  # an embedding may be of several tokens
        for prompt in prompts if tokenizer is not None else ():
            whole = convert(prompt, tokenizer) if convert is not None else prompt
            tokens = len(tokenizer(whole).input_ids)
            if tokens > tokenizer.model_max_length:
                raise UserError(
                    f"a prompt must have at most {tokenizer.model_max_length} tokens, but `{prompt}` has {tokens}."
                )

    def png(self, prompt: str, generator: torch.Generator) -> bytes:
        """Return one image, or raise UserError if it is not finite. No batches: its bits must not depend on others."""
        config = self.config
        with torch.inference_mode():
            pixels = self.pipeline(
                prompt,
                height=config.image_size,
                width=config.image_size,
                num_inference_steps=config.num_inference_steps,
                guidance_scale=config.guidance_scale,
                generator=generator,
                output_type="np",
            ).images[0]
        image = torch.from_numpy(pixels)
        if not image.isfinite().all():
            raise UserError(
                f"`synthetic.model` {config.model} gives images that are not finite in {self.pipeline.dtype}; "
                "`--device cpu` computes in single precision."
            )
        file = io.BytesIO()
        Image.fromarray((image * 255).round().to(torch.uint8).numpy()).save(file, "png")
        return file.getvalue()

    def _find(self) -> Path:
        """Return the checkpoint's folder, which may be in the hub's cache, after downloading it if necessary."""
        model, folder = self.config.model, resolve(self.config.model)
        if folder.is_dir():
            if not (folder / INDEX).is_file():
                raise UserError(f"`synthetic.model` {model} is a folder without {INDEX} ({folder}).")
            return folder
        try:
            return Path(self.library.DiffusionPipeline.download(model, safety_checker=None))
        except Exception as error:  # the hub's library raises exceptions of many kinds
            raise UserError(
                f"`synthetic.model` {model} is neither a folder nor in the hub's cache and cannot be downloaded "
                f"({type(error).__name__}: {one_line(error)}); load it once where there is a network."
            ) from error

    def _load(self, dtype: torch.dtype) -> Any:
        model = self.config.model
        with _told(f"`synthetic.model` {model} cannot be loaded"), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of `torch_dtype`, the only name that all releases know
            index = json.loads((self.folder / INDEX).read_text(encoding="utf-8"))
            checker = {"safety_checker": None, "requires_safety_checker": False} if "safety_checker" in index else {}
            found = self.library.DiffusionPipeline.from_pretrained(
                self.folder, torch_dtype=dtype, local_files_only=True, **checker
            )
        if lacking := ASKED - set(inspect.signature(found.__call__).parameters):
            raise UserError(
                f"`synthetic.model` {model} must be a text-to-image pipeline, but its {type(found).__name__} takes no "
                f"{min(lacking)}."
            )
        found.set_progress_bar_config(disable=True)
        return found


@contextlib.contextmanager
def _told(whole: str) -> Iterator[None]:
    """Raise UserError, which begins with `whole`, for any exception."""
    try:
        yield
    except Exception as error:  # each format has its own
        raise UserError(f"{whole}: {one_line(error)}.") from error


def _library() -> Any:
    try:
        import diffusers
        import transformers
    except ModuleNotFoundError as error:
        if error.name != "diffusers":
            raise
        raise UserError(
            "`fedsweep data generate` needs diffusers; `pip install fedsweep[diffusers]` installs it."
        ) from None
    for logging in (diffusers.utils.logging, transformers.utils.logging):
        logging.set_verbosity_error()
        logging.disable_progress_bar()
    return diffusers


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


RECIPE = "recipe.json"


@dataclass(frozen=True)
class Wanted:
    """An image to generate, and the path of its file."""

    domain: str
    class_name: str
    number: int
    path: Path


@dataclass(frozen=True)
class Generation:
    """The images that an experiment needs from a text-to-image model."""

    config: Diffusers
    data: FederatedData
    folder: Path
    images: tuple[Wanted, ...]

    @property
    def missing(self) -> list[Wanted]:
        """The images that have no file yet."""
        return [one for one in self.images if not one.path.is_file()]


def plan_generation(config: RunConfig, where: str) -> Generation:
    """List the images of an experiment, or raise UserError if its configuration or data does not allow any."""
    synthetic = config.synthetic
    if not isinstance(synthetic, Diffusers):
        raise UserError(
            f"{where}: `fedsweep data generate` makes the images of `synthetic` diffusers, but it is {synthetic.name}."
        )
    data = load(config.data)
    for name in (*(one.name for one in data.domains), *data.class_names):
        if "/" in name or name.startswith(".") or name == "__MACOSX":
            raise UserError(
                f"generated images need a folder that is called `{name}` as in {data.name}, which none can be."
            )
    folder = data_folder() / "generated" / synthetic.set_name(data)
    images = []
    for domain in data.domains:
        wanted = synthetic.wanted(domain, data.class_names)
        if max(wanted) < 2:  # a set is prepared with a split, and one image cannot be divided
            raise UserError(
                f"`synthetic.share` {synthetic.share:g} must give some class two images, but of {domain.name} it gives "
                f"{sum(wanted)} for {len(wanted)} classes."
            )
        for class_name, count in zip(data.class_names, wanted, strict=True):
            place = folder / domain.name / class_name
            images += [Wanted(domain.name, class_name, one, place / f"{one:05d}.png") for one in range(count)]
    return Generation(synthetic, data, folder, tuple(images))


def generate(generation: Generation, device: str = "cpu", progress: Progress = lambda done, total: None) -> int:
    """Make the missing images, one after the other, and return their number.

    Raise UserError if the model is missing or changed, a prompt is too long, the lock is taken, or the disk is full.
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
    except OSError as error:  # a full disk; what was whole before is still whole
        raise UserError(f"{folder} cannot be written: {error.strerror or error}.") from None


def prepare_generated(
    generation: Generation, workers: int = 1, progress: Progress = lambda done, total: None
) -> Prepared:
    """Prepare the images at the size of the data, anew if there are more than before; raise UserError as `prepare`."""
    options = Options(generation.folder.name, size_of(generation.data), Domains.name)
    plan = make_plan(options, generation.folder, Domains())
    card = read_card(plan.folder) if is_store(plan.folder) else None
    older = card is not None and (card.plan, card.times) != (plan.key(), plan.times())
    busy = min(workers, 1 + len(plan.listing.items) // CHUNK)
    return prepare(plan, busy, force=older, progress=progress)


def _check_recipe(generation: Generation, content: dict[str, str], library: str) -> None:
    """Record the content of model and embeddings with the first images; raise UserError if it differs later."""
    path = generation.folder / RECIPE
    if path.is_file():
        if read_json(path).get("content") != content:
            raise UserError(
                f"{generation.folder} holds images of another content of `synthetic.model` or `synthetic.embeddings`; "
                "move it away to begin anew."
            )
        return
    config, data = generation.config, generation.data
    recipe = config.model_dump(mode="json", exclude={"share"})
    prompts = [config.prompt(domain.name, data.class_names[0]) for domain in data.domains]  # a sample for readers
    record = {"recipe": recipe, "content": content, "diffusers": library, "prompts": prompts}
    write_atomically(path, (json.dumps(record, indent=2, ensure_ascii=False) + "\n").encode())
