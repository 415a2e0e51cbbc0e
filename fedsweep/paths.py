"""Where experiments and search spaces are found: the working directory first, then those that ship with fedsweep."""

from pathlib import Path
from typing import Literal

from fedsweep.errors import UserError, near

Kind = Literal["experiments", "search_spaces"]
_SINGULAR = {"experiments": "experiment", "search_spaces": "search space"}


def folders(kind: Kind) -> list[Path]:
    """Existing folders, the one that wins first."""
    package = Path(__file__).parent
    candidates = [Path.cwd() / kind, package / "shipped" / kind, package.parent / kind]
    return [folder for folder in dict.fromkeys(path.resolve() for path in candidates) if folder.is_dir()]


def available(kind: Kind) -> dict[str, Path]:
    """All names with their file, e.g. `ablations/lora_rank`."""
    found: dict[str, Path] = {}
    for folder in reversed(folders(kind)):
        for path in sorted(folder.rglob("*.yaml")):
            found[path.relative_to(folder).with_suffix("").as_posix()] = path
    return dict(sorted(found.items()))


def find(kind: Kind, name: str) -> Path:
    """The file of an experiment or search space.

    Raises:
        UserError: there is none of that name.
    """
    known = available(kind)
    if name not in known:
        by_leaf = [full for full in known if full.rsplit("/", 1)[-1] == name]
        hint = f"; did you mean `{by_leaf[0]}`?" if by_leaf else near(name, known)
        where = f"`fedsweep list` names those that are there{hint or '.'}"
        raise UserError(f"there is no {_SINGULAR[kind]} `{name}`; {where}")
    return known[name]


def summary(path: Path) -> str:
    """The first comment of a YAML file, its one-line description."""
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            return line.lstrip("# ").rstrip()
    return ""
