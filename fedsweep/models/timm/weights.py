"""timm's own pre-trained weights, which are downloaded once and then read from Hugging Face's local cache."""

from pathlib import Path
from typing import Any

from torch import nn

from fedsweep.common.errors import UserError
from fedsweep.models.checkpoint_folder import SECONDS
from fedsweep.models.timm.architecture import timm_config
from fedsweep.models.weights_file import reason


def pretrained_network(model: str, **shape: Any) -> nn.Module:
    """Return a timm model, including its head, with the pre-trained weights that the tag in `model` selects.

    `shape` contains timm's arguments that set sizes, such as `img_size`.

    Raises:
        UserError: The weights cannot be loaded, or do not fit the shape.
    """
    import timm

    file = locate(model)
    overlay = {"file": str(file), "custom_load": file.suffix == ".npz"} if file else {}
    try:
        return timm.create_model(model, pretrained=True, pretrained_cfg_overlay=overlay, **shape)
    except OSError as error:
        raise _unreachable(model, error) from error
    except Exception as error:  # each file format raises its own exceptions
        raise UserError(f"timm's weights {model} cannot be loaded: {reason(error)}.") from error


def locate(model: str) -> Path | None:
    """Return the path of timm's weights in Hugging Face's local cache; download the weights if necessary.

    Returns:
        The path, or None for the few timm models whose weights are not on the Hugging Face Hub.

    Raises:
        UserError: The file is not cached and cannot be downloaded.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    config = timm_config(model)
    if not config.hf_hub_id:
        return None
    repository, _, revision = config.hf_hub_id.partition("@")
    where: dict[str, Any] = {"repo_id": repository, "revision": revision or None}
    pickled = config.hf_hub_filename or "pytorch_model.bin"
    names = dict.fromkeys([pickled.replace("pytorch_model.bin", "model.safetensors"), pickled])
    for name in names:
        if isinstance(cached := try_to_load_from_cache(filename=name, **where), str):
            return Path(cached)
    for name in names:
        try:
            # This request fails at once without a network, whereas the download would retry for half a minute.
            get_hf_file_metadata(hf_hub_url(filename=name, **where), timeout=SECONDS)
            return Path(hf_hub_download(filename=name, **where))
        except Exception as error:  # huggingface_hub raises exceptions without a common base class
            if isinstance(error, LocalEntryNotFoundError) or not isinstance(error, EntryNotFoundError):
                raise _unreachable(model, error) from error
    raise UserError(
        f"timm's weights {model} are not on the Hugging Face Hub: {repository} has no {' or '.join(names)}."
    )


def _unreachable(model: str, error: Exception) -> UserError:
    first_line = (str(error).strip().splitlines() or [""])[0].rstrip(".")
    return UserError(
        f"timm's weights {model} are not in the cache and cannot be downloaded ({type(error).__name__}: {first_line}); "
        "load them once with network access, or set `backbone.pretrained` to a file that contains them, to a file that "
        "`fedsweep pretrain` wrote, or to none for random weights (on the command line, add "
        "`backbone.pretrained=none`)."
    )
