"""Image generation with a text-to-image pipeline of diffusers. Only this module imports diffusers."""

import contextlib
import hashlib
import inspect
import io
import json
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from fedsweep.common.errors import UserError, one_line
from fedsweep.common.paths import resolve
from fedsweep.data.synthetic.generated import Diffusers

INDEX = "model_index.json"
ASKED = {"prompt", "height", "width", "num_inference_steps", "guidance_scale", "generator", "output_type"}
"""Parameters that the call of a pipeline must accept."""


class TextToImage:
    """A text-to-image pipeline of diffusers, in half precision on a GPU and in single precision on a CPU.

    The pipeline has no safety checker. The constructor raises UserError if diffusers, the checkpoint or an embedding is
    missing or cannot be read.
    """

    def __init__(self, config: Diffusers, device: str = "cpu") -> None:
        self.config = config
        self.library = _library()
        self.folder = self._find()
        self.embeddings: dict[str, Path] = {}
        for domain, name in config.embeddings.items():
            path = self.embeddings[config.styles[domain]] = resolve(name)
            if not path.is_file():
                raise UserError(f"`synthetic.embeddings` {name} does not exist (looked for {path}).")
        self.pipeline: Any = self._load(torch.float16 if device == "cuda" else torch.float32).to(device)
        for token, path in self.embeddings.items():
            whole = f"`synthetic.embeddings` {path} cannot be loaded as `{token}` of `synthetic.model` {config.model}"
            with _told(whole):
                self.pipeline.load_textual_inversion(str(path), token=token, local_files_only=True)

    def content(self) -> dict[str, str]:
        """Return digests of the files from which the pipeline was loaded.

        The entry `model` is the commit of a model on the Hugging Face Hub, or the SHA-256 of a folder. The other
        entries map the token of each embedding to the SHA-256 of its file.
        """
        if self.folder.parent.name == "snapshots":  # folders in Hugging Face's cache are named after commits
            model = self.folder.name
        else:
            found = hashlib.sha256()
            for path in sorted(one for one in self.folder.rglob("*") if one.is_file() and not one.name.startswith(".")):
                found.update(f"{path.relative_to(self.folder).as_posix()}\0{_digest(path)}\0".encode())
            model = found.hexdigest()
        return {"model": model, **{token: _digest(path) for token, path in sorted(self.embeddings.items())}}

    def check(self, prompts: Sequence[str]) -> None:
        """Raise UserError if a prompt has more tokens than the text encoder accepts."""
        tokenizer: Any = getattr(self.pipeline, "tokenizer", None)
        convert: Any = getattr(self.pipeline, "maybe_convert_prompt", None)  # an embedding may have several tokens
        for prompt in prompts if tokenizer is not None else ():
            whole = convert(prompt, tokenizer) if convert is not None else prompt
            tokens = len(tokenizer(whole).input_ids)
            if tokens > tokenizer.model_max_length:
                raise UserError(
                    f"a prompt must have at most {tokenizer.model_max_length} tokens, but `{prompt}` has {tokens}."
                )

    def png(self, prompt: str, generator: torch.Generator) -> bytes:
        """Generate one image for a prompt as a PNG file, or raise UserError if its pixels are not finite.

        Images are not generated in batches, so that an image does not depend on other images.
        """
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
                f"`synthetic.model` {config.model} generates pixels that are not finite in {self.pipeline.dtype}; "
                "use `--device cpu` to compute in single precision."
            )
        file = io.BytesIO()
        Image.fromarray((image * 255).round().to(torch.uint8).numpy()).save(file, "png")
        return file.getvalue()

    def _find(self) -> Path:
        """Return the folder of the checkpoint.

        A checkpoint on the Hugging Face Hub is downloaded, unless it is in the local cache.
        """
        model, folder = self.config.model, resolve(self.config.model)
        if folder.is_dir():
            if not (folder / INDEX).is_file():
                raise UserError(f"`synthetic.model` {model} is a folder without {INDEX} ({folder}).")
            return folder
        try:
            return Path(self.library.DiffusionPipeline.download(model, safety_checker=None))
        except Exception as error:  # Hugging Face's library raises many types
            raise UserError(
                f"`synthetic.model` {model} is neither a folder nor in Hugging Face's cache and cannot be downloaded "
                f"({type(error).__name__}: {one_line(error)}); load it once with network access."
            ) from error

    def _load(self, dtype: torch.dtype) -> Any:
        model = self.config.model
        with _told(f"`synthetic.model` {model} cannot be loaded"), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # about `torch_dtype`, the only name that all releases have
            index = json.loads((self.folder / INDEX).read_text(encoding="utf-8"))
            checker = {"safety_checker": None, "requires_safety_checker": False} if "safety_checker" in index else {}
            found = self.library.DiffusionPipeline.from_pretrained(
                self.folder, torch_dtype=dtype, local_files_only=True, **checker
            )
        if lacking := ASKED - set(inspect.signature(found.__call__).parameters):
            raise UserError(
                f"`synthetic.model` {model} must be a text-to-image pipeline, but its {type(found).__name__} has no "
                f"parameter {min(lacking)}."
            )
        found.set_progress_bar_config(disable=True)
        return found


@contextlib.contextmanager
def _told(whole: str) -> Iterator[None]:
    """Convert any exception to a UserError whose message begins with `whole`."""
    try:
        yield
    except Exception as error:  # each file format has exceptions of its own
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
