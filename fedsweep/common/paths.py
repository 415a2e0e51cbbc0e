"""The paths of the data and cache folders, and the lookup of experiments and search spaces by name."""

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
FOR_EDITORS = "yaml-language-server:"
"""The beginning of the comment that tells editors the JSON schema of a YAML file."""
_SINGULAR = {"experiments": "experiment", "search_spaces": "search space", "pretrain": "pre-training"}
RESULTS = "mlruns"
"""The default name of the results folder."""
MARKER = "fedsweep.toml"
"""The file in the root folder of a project."""
_FOLDERS = {"experiments": "experiments", "search_spaces": "search_spaces", "pretrain": "experiments/pretrain"}


def check_working_directory() -> None:
    """Raise UserError if the working directory has been deleted."""
    try:
        Path.cwd()
    except FileNotFoundError:
        raise UserError("the working directory no longer exists; change to another folder.") from None


def project_folder() -> Path:
    """Return the root folder of the project that contains the working directory, or else the working directory.

    The root is the nearest folder with the file `fedsweep.toml`, which `fedsweep init` writes. The folders above the
    home folder, above the root of a Git repository, and above a folder of another owner are not searched.
    """
    here = Path.cwd()
    owner, top = here.stat().st_uid, _user_home()
    for folder in (here, *here.parents):
        if folder.stat().st_uid != owner:
            break
        if (folder / MARKER).is_file():
            return folder
        if folder == top or (folder / ".git").exists():
            break
    return here


def _user_home() -> Path | None:
    with contextlib.suppress(RuntimeError):  # the user has no home folder
        return Path.home()
    return None


def home() -> Path:
    """Return the base folder for relative paths: FEDSWEEP_HOME if it is set, and otherwise the project's root folder.

    The process that runs a sweep sets FEDSWEEP_HOME for its workers, whose working directories may differ.
    """
    given = os.environ.get("FEDSWEEP_HOME")
    return Path(given).absolute() if given else project_folder()


def results_folder(name: str | Path) -> Path:
    """Return the path of the results folder `name`.

    The default name, `mlruns`, is a folder in the project's root folder. Another relative path is relative to the
    working directory.
    """
    return project_folder() / RESULTS if str(name) == RESULTS else Path(name)


def data_folder() -> Path:
    """Return the folder of prepared data sets and pre-trained weights: FEDSWEEP_DATA or, by default, `data/`."""
    return home() / Path(os.environ.get("FEDSWEEP_DATA") or "data").expanduser()


def activation_folder() -> Path:
    """Return the folder in which activations of frozen blocks are cached.

    The folder is FEDSWEEP_CACHE or, by default, `fedsweep/activations` in the user's cache folder.
    """
    return _cache("activations", "")


def mirror_folder(uri: str) -> Path:
    """Return the folder of the local copy of the remote results at `uri`.

    The folder is inside FEDSWEEP_CACHE or, by default, the user's cache folder.
    """
    return _cache("stores", "stores") / hashlib.sha256(uri.encode()).hexdigest()[:16]


def _cache(usual: str, named: str) -> Path:
    given = os.environ.get("FEDSWEEP_CACHE")
    folder = Path(given, named) if given else Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "fedsweep", usual)
    try:
        return home() / folder.expanduser()
    except RuntimeError:  # the user has no home folder
        return Path(tempfile.gettempdir()) / "fedsweep" / usual


def gigabytes(text: str) -> float:
    """Parse a number of gigabytes. Return NaN if `text` is not a finite number of at least 0."""
    with contextlib.suppress(ValueError):
        if 0 <= (number := float(text)) < math.inf:
            return number
    return math.nan


def activation_bytes() -> int:
    """Return the maximum size of the activation cache in bytes: FEDSWEEP_CACHE_GB or, by default, 10 GB.

    Raises:
        UserError: FEDSWEEP_CACHE_GB is not a number of at least 0.
    """
    given = os.environ.get("FEDSWEEP_CACHE_GB") or "10"
    if math.isnan(size := gigabytes(given)):
        rule = "must be a number of gigabytes, at least 0"
        raise UserError(f"the environment variable FEDSWEEP_CACHE_GB {rule}, but it is {given}.")
    return int(size * 1e9)


def environment() -> dict[str, str]:
    """Return environment variables that configure another process in the same way as this process.

    The variables set the folders, the size of the activation cache, and the number and the memory of the logical GPUs
    (GPUs that are simulated on the CPU).
    """
    folders = {"FEDSWEEP_HOME": home(), "FEDSWEEP_DATA": data_folder(), "FEDSWEEP_CACHE": activation_folder()}
    others = ("FEDSWEEP_CACHE_GB", "FEDSWEEP_LOGICAL_GPUS", "FEDSWEEP_LOGICAL_GPU_GB")
    given = {name: value for name in others if (value := os.environ.get(name))}
    return {name: str(path) for name, path in folders.items()} | given


def inside(folder: Path, *names: str) -> Path:
    """Return the path `folder/*names`, or raise UserError if this path is not safe.

    A path is not safe if it contains `..`, if a link or a leading `/` leads out of `folder`, or if a name is empty.
    """
    path, named = folder.joinpath(*names), "/".join(names)
    within = "\0" not in named and path != folder and path.resolve().is_relative_to(folder.resolve())
    if not within or not all(Path(name).parts for name in names) or ".." in path.relative_to(folder).parts:
        raise UserError(f"a name must refer to a path inside {folder}, but `{named!a}` does not.")
    return path


def resolve(name: str) -> Path:
    """Return the path of the file that an experiment refers to as `name`.

    A relative name is first looked up in the folder `home()`. If no such file exists there, the path in the data folder
    is returned.
    """
    path = home() / Path(name).expanduser()
    return path if path.exists() else data_folder() / Path(name).expanduser()


def relative(path: Path) -> str:
    """Return a path as text, relative to the working directory if the path is inside it."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def with_tilde(path: Path) -> str:
    """Return a path as text, with `~` instead of the user's home folder."""
    top = _user_home()
    return f"~/{path.relative_to(top)}" if top and path != top and path.is_relative_to(top) else str(path)


def shown_place(path: Path, line: int, column: int) -> str:
    """Return a place in a file as editors and terminals read it, e.g. `experiments/mine.yaml:3:9`.

    The first line and the first column have the number 1.
    """
    return f"{relative(path)}:{line}:{column}"


def own_files(found: Iterable[Path]) -> frozenset[Path]:
    """Return those of the found YAML files (see `available`) that belong to the user, and not to fedsweep.

    In a checkout of fedsweep's repository, these are the files that git does not track.
    """
    import subprocess  # only `fedsweep list` needs it

    package = Path(__file__).parent.parent.resolve()
    own = frozenset(path for path in found if not path.is_relative_to(package / "shipped"))
    if not (package.parent / ".git").exists():
        return own
    command = ["git", "ls-files", "--others", "-z", "--", "experiments", "search_spaces"]
    listed = subprocess.run(command, cwd=package.parent, capture_output=True, text=True, check=False)
    untracked = {package.parent / name for name in listed.stdout.split("\0") if name}
    return frozenset(path for path in own if path in untracked or not path.is_relative_to(package.parent))


def available(kind: Kind) -> dict[str, Path]:
    """Return a dict from the name of each YAML file of kind `kind`, such as `ablations/lora_rank`, to the file's path.

    A pre-training configuration is not an experiment, although its file is in a subfolder of the experiments folder.
    """
    found: dict[str, Path] = {}
    for root in (shipped_folder(), project_folder()):  # the last one takes precedence
        folder = (root / _FOLDERS[kind]).resolve()
        for path in sorted(path for path in folder.rglob("*.yaml") if path.is_file()):
            name = path.relative_to(folder).with_suffix("").as_posix()
            if kind != "experiments" or not name.startswith("pretrain/"):
                found[name] = path
    return dict(sorted(found.items()))


def shipped_folder() -> Path:
    """Return the folder with the shipped `experiments` and `search_spaces`.

    This is the folder `shipped` of an installed package, or else the repository.
    """
    package = Path(__file__).parent.parent
    return package / "shipped" if (package / "shipped").exists() else package.parent


def find(kind: Kind, name: str, where: str = "") -> Path:
    """Return the path of the YAML file with this name, or raise UserError if there is none.

    Args:
        kind: The kind of the file: an experiment, a search space or a pre-training configuration.
        name: The name, such as `ablations/lora_rank`.
        where: The file that refers to the name, if any. The error message begins with it.
    """
    return find_either(name, (kind,), where)[1]


def find_either(
    name: str, kinds: Sequence[Kind] = ("experiments", "search_spaces"), where: str = ""
) -> tuple[Kind, Path]:
    """Return the kind and the path of the YAML file with this name, or raise UserError if there is none.

    Args:
        name: The name, such as `ablations/lora_rank`.
        kinds: The possible kinds of the file. If several kinds have a file with this name, the first kind is used.
        where: The file that refers to the name, if any. The error message begins with it.
    """
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
    return hint or "; run `fedsweep list all` to see all names."


def summary(path: Path) -> str:
    """Return the description of a YAML file, which is its first comment line that is not an instruction to editors."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    comments = (line.lstrip("# ").rstrip() for line in lines if line.startswith("#"))
    return next((comment for comment in comments if not comment.startswith(FOR_EDITORS)), "")
