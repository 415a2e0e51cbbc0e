"""timm's own pre-trained weights, from the cache without a look at the network, or downloaded once."""

from pathlib import Path
from typing import Any

from torch import nn

from fedsweep.common.errors import UserError
from fedsweep.models.checkpoint_folder import SECONDS
from fedsweep.models.timm.architecture import timm_config
from fedsweep.models.weights_file import reason


def pretrained_network(model: str, **shape: Any) -> nn.Module:
    """Return timm's model with its tag's weights and head; raise UserError if they cannot be loaded or do not fit."""
    import timm

    file = locate(model)
    overlay = {"file": str(file), "custom_load": file.suffix == ".npz"} if file else {}
    try:
        return timm.create_model(model, pretrained=True, pretrained_cfg_overlay=overlay, **shape)
    except OSError as error:
        raise _unreachable(model, error) from error
    except Exception as error:  # each format has its own
        raise UserError(f"timm's weights {model} cannot be loaded: {reason(error)}.") from error


def locate(model: str) -> Path | None:
    """Return the weights' file in the hub's cache, downloaded if need be; None for the few that are not on the hub.

    Raise UserError if the file is not cached and one attempt to download it fails.
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
            # Without this question first, the download would repeat itself for half a minute where there is no network.
            get_hf_file_metadata(hf_hub_url(filename=name, **where), timeout=SECONDS)
            return Path(hf_hub_download(filename=name, **where))
        except Exception as error:  # the hub's library does not keep to one family of exceptions
            if isinstance(error, LocalEntryNotFoundError) or not isinstance(error, EntryNotFoundError):
                raise _unreachable(model, error) from error
    raise UserError(f"timm's weights {model} are not on the hub: {repository} has no {' or '.join(names)}.")


def _unreachable(model: str, error: Exception) -> UserError:
    first_line = (str(error).strip().splitlines() or [""])[0].rstrip(".")
    return UserError(
        f"timm's weights {model} are not in the cache and cannot be downloaded ({type(error).__name__}: {first_line}); "
        "load them once where there is a network, or name a file of them as `backbone.pretrained`."
    )
