"""The folders of data and caches, and the lookup of experiments and search spaces by name."""

import contextlib
import hashlib
import math
import os
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

from fedsweep.common.errors import UserError, near

Kind = Literal["experiments", "search_spaces", "pretrain"]
VERBS: dict[Kind, str] = {"experiments": "run", "search_spaces": "tune", "pretrain": "pretrain"}
_SINGULAR = {"experiments": "experiment", "search_spaces": "search space", "pretrain": "pre-training"}
_FOLDERS = {"experiments": "experiments", "search_spaces": "search_spaces", "pretrain": "experiments/pretrain"}


def home() -> Path:
    """Return the base folder of relative paths: FEDSWEEP_HOME, which is set for workers, or the working directory."""
    return Path(os.environ.get("FEDSWEEP_HOME", "")).absolute()


def data_folder() -> Path:
    """Return the folder of prepared data sets and pre-trained backbones: FEDSWEEP_DATA or, by default, `data/`."""
    return home() / Path(os.environ.get("FEDSWEEP_DATA") or "data").expanduser()


def activation_folder() -> Path:
    """Return the folder that caches activations of frozen blocks: FEDSWEEP_CACHE, or one in the user's cache folder."""
    return _cache("activations", "")


def mirror_folder(uri: str) -> Path:
    """Return the folder for the local copy of remote results, in FEDSWEEP_CACHE or the user's cache folder."""
    return _cache("stores", "stores") / hashlib.sha256(uri.encode()).hexdigest()[:16]


def _cache(usual: str, named: str) -> Path:
    given = os.environ.get("FEDSWEEP_CACHE")
    folder = Path(given, named) if given else Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "fedsweep", usual)
    try:
        return home() / folder.expanduser()
    except RuntimeError:  # the user has no home folder
        return Path(tempfile.gettempdir()) / "fedsweep" / usual


def gigabytes(text: str) -> float:
    """Return the number in `text`, or NaN if it is not a finite number of at least 0."""
    with contextlib.suppress(ValueError):
        if 0 <= (number := float(text)) < math.inf:
            return number
    return math.nan


def activation_bytes() -> int:
    """Return the maximum size of the activation cache in bytes: FEDSWEEP_CACHE_GB, or 10 GB by default.

    Raises:
        UserError: FEDSWEEP_CACHE_GB is not a number of at least 0.
    """
    given = os.environ.get("FEDSWEEP_CACHE_GB") or "10"
    if math.isnan(size := gigabytes(given)):
        rule = "must be a number of gigabytes, at least 0"
        raise UserError(f"the environment variable FEDSWEEP_CACHE_GB {rule}, but it is {given}.")
    return int(size * 1e9)


def environment() -> dict[str, str]:
    """Return the environment variables with which another process uses the same folders and logical GPUs."""
    folders = {"FEDSWEEP_HOME": home(), "FEDSWEEP_DATA": data_folder(), "FEDSWEEP_CACHE": activation_folder()}
    others = ("FEDSWEEP_CACHE_GB", "FEDSWEEP_LOGICAL_GPUS", "FEDSWEEP_LOGICAL_GPU_GB")
    given = {name: value for name in others if (value := os.environ.get(name))}
    return {name: str(path) for name, path in folders.items()} | given


def inside(folder: Path, *names: str) -> Path:
    """Return the path `folder/*names`, or raise UserError if `..`, a link or a leading `/` leads out of the folder."""
    path, named = folder.joinpath(*names), "/".join(names)
    within = "\0" not in named and path != folder and path.resolve().is_relative_to(folder.resolve())
    if not within or not all(Path(name).parts for name in names) or ".." in path.relative_to(folder).parts:
        raise UserError(f"a name must refer to a path inside {folder}, but `{named!a}` does not.")
    return path


def resolve(name: str) -> Path:
    """Return the path of a file that an experiment names: below `home` if it exists there, else in the data folder."""
    path = home() / Path(name).expanduser()
    return path if path.exists() else data_folder() / Path(name).expanduser()


def available(kind: Kind) -> dict[str, Path]:
    """Return the YAML files of a kind by name, e.g. `ablations/lora_rank`. Experiments do not include pre-trainings."""
    package = Path(__file__).parent.parent
    found: dict[str, Path] = {}
    for root in (package.parent, package / "shipped", Path.cwd()):  # the last one takes precedence
        folder = (root / _FOLDERS[kind]).resolve()
        for path in sorted(path for path in folder.rglob("*.yaml") if path.is_file()):
            name = path.relative_to(folder).with_suffix("").as_posix()
            if kind != "experiments" or not name.startswith("pretrain/"):
                found[name] = path
    return dict(sorted(found.items()))


def find(kind: Kind, name: str, where: str = "") -> Path:
    """Return the YAML file of this kind and name, or raise UserError.

    `where` is the file that refers to the name, if any. The error message begins with it.
    """
    return find_either(name, (kind,), where)[1]


def find_either(
    name: str, kinds: Sequence[Kind] = ("experiments", "search_spaces"), where: str = ""
) -> tuple[Kind, Path]:
    """Return the kind and the YAML file of a name that may have any of the given kinds, or raise UserError."""
    known = {kind: available(kind) for kind in kinds}
    for kind in kinds:
        if name in known[kind]:
            return kind, known[kind][name]
    asked = f"{where}: " if where else ""
    sought = " or ".join(_SINGULAR[kind] for kind in kinds)
    names = [one for kind in kinds for one in known[kind]]
    raise UserError(f"{asked}there is no {sought} `{name}`{_hint(kinds, name, names)}")


def _hint(asked: Sequence[Kind], name: str, known: Iterable[str]) -> str:
    for other, verb in VERBS.items():
        bare = name.removeprefix("pretrain/") if other == "pretrain" else name
        if other not in asked and bare in available(other):
            return f"; to use the {_SINGULAR[other]} of that name, run `fedsweep {verb} {bare}`."
    for kind in asked:
        name = name.removeprefix(f"{kind}/")
    bare = name.removesuffix(".yaml")
    same = [full for full in known if bare in (full, full.rsplit("/", 1)[-1])]
    # The cutoff is stricter than the default, because names in the same folder are similar.
    hint = f"; did you mean `{same[0]}`?" if same else near(bare, known, cutoff=0.75)
    return hint or "; run `fedsweep list` to see all names."


def summary(path: Path) -> str:
    """Return the description of a YAML file: its first comment line."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    return next((line.lstrip("# ").rstrip() for line in lines if line.startswith("#")), "")
