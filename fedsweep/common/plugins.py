"""Methods, data sources, aggregation rules and metrics of other installed packages, found by their entry points.

A package adds a class to fedsweep with an entry point in its `pyproject.toml`:

    [project.entry-points."fedsweep.methods"]
    fedprox_a = "fedsweep_fedprox_a:FedProxA"

The part after `fedsweep.` is the kind of the class (see `KINDS`), and the key is the name of the class in YAML files.
"""

import inspect
from collections.abc import Callable, Iterable
from functools import cache
from importlib import metadata
from importlib.metadata import EntryPoint
from importlib.util import find_spec
from pathlib import Path, PurePath
from traceback import extract_tb
from typing import Any, Literal, TypeVar, get_args, get_origin

from fedsweep.common.code_digest import code_files, digest, is_code
from fedsweep.common.errors import UserError, one_line

Kind = Literal["methods", "data", "aggregation", "metrics"]
KINDS: tuple[Kind, ...] = get_args(Kind)
GROUPS: dict[Kind, str] = {kind: f"fedsweep.{kind}" for kind in KINDS}
"""The group of entry points of each kind of class."""
EDITABLE = ("__editable__", "_editable_impl_")
"""Prefixes of the files that build tools create for an editable installation. The files contain absolute paths."""
Listed = TypeVar("Listed")


@cache
def installed() -> tuple[EntryPoint, ...]:
    """Return the entry points of all plug-ins, sorted by group, name and package. No package is imported."""
    found = metadata.entry_points()
    points = [point for group in GROUPS.values() for point in found.select(group=group)]
    return tuple(sorted(points, key=lambda point: (point.group, point.name, package(point))))


def package(point: EntryPoint) -> str:
    """Return the name of the package that declares an entry point."""
    return point.dist.name if point.dist is not None else "an unknown package"


def load(
    kind: Kind,
    base: type[Listed],
    built_in: Iterable[str],
    fault: Callable[[Any], str | None] = lambda found: None,
    broken: list[UserError] | None = None,
) -> tuple[type[Listed], ...]:
    """Import the classes of one kind that installed packages add, and return them, sorted by name.

    Args:
        kind: The kind of the classes.
        base: The class from which they must inherit.
        built_in: The names that fedsweep itself uses, which are taken.
        fault: A function that returns the rule that a class breaks as the end of the sentence "the class ...", or None.
        broken: A list to which the errors about broken entry points are added instead of being raised.

    Raises:
        UserError: An entry point cannot be imported, refers to a wrong class, or has a wrong name or a taken name.
    """
    taken = dict.fromkeys(built_in, "fedsweep itself")
    found: list[type[Listed]] = []
    for point in installed():
        if point.group != GROUPS[kind]:
            continue
        try:
            if point.name in taken:
                raise _broken(point, f"must not have a name of {taken[point.name]}", "rename its class")
            found.append(_loaded(point, base, fault))
            taken[point.name] = f"the package {package(point)}"
        except UserError as error:
            if broken is None:
                raise
            broken.append(error)
    return tuple(found)


def name_of(listed: type) -> str:
    """Return the name of a class in YAML files, or an empty text if the class has no name."""
    fields = getattr(listed, "model_fields", {})
    name = fields["name"].default if "name" in fields else getattr(listed, "name", None)
    return name if isinstance(name, str) else ""


def _loaded(point: EntryPoint, base: type[Listed], fault: Callable[[Any], str | None]) -> type[Listed]:
    try:
        found = point.load()
    except UserError:
        raise
    except Exception as error:  # any line of the module can fail
        cause = f"{type(error).__name__}: {one_line(error)}{_line(point, error)}"
        raise _broken(point, f"must be importable, but `{point.value}` is not ({cause})", "repair it") from None
    required = f"must name a class that inherits from {base.__module__}.{base.__name__}"
    if not (inspect.isclass(found) and issubclass(found, base)):
        raise _broken(point, f"{required}, but `{point.value}` does not", "correct the entry point")
    if inspect.isabstract(found):
        missing = ", ".join(f"`{name}`" for name in sorted(vars(found)["__abstractmethods__"]))
        raise _broken(point, f"{required} and defines {missing}, but `{point.value}` does not", "add what is missing")
    if (name := name_of(found)) != point.name or not _is_constant(found):
        declared = f'must have a class that declares `name: Literal["{point.name}"] = "{point.name}"`'
        if "name" not in getattr(found, "model_fields", {}):
            declared = f'must have a class that declares `name = "{point.name}"`'
        raise _broken(point, f"{declared}, but the name of `{point.value}` is {name or 'missing'}", "make them equal")
    if (rule := fault(found)) is not None:
        raise _broken(point, f"must name a class that {rule}", "correct the class")
    return found


def _line(point: EntryPoint, error: Exception) -> str:
    """Return the last line of the plug-in's own code that led to an error, as " at FILE:LINE"; empty if there is none.

    A syntax error states its line itself.
    """
    own = {path.resolve() for path in _code([point]).values()}
    frames = [one for one in extract_tb(error.__traceback__) if Path(one.filename).resolve() in own]
    return f", at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""


def _is_constant(found: type) -> bool:
    """Return whether the name of a class can have only one value, so that the name selects the class."""
    field = getattr(found, "model_fields", {}).get("name")
    return field is None or (get_origin(field.annotation) is Literal and get_args(field.annotation) == (field.default,))


def _broken(point: EntryPoint, rule: str, remedy: str) -> UserError:
    """Return the error about an entry point, a sentence with its package, its name, the rule and the remedy."""
    who = f"{package(point)}{f' {point.dist.version}' if point.dist is not None else ''}"
    return UserError(
        f"the entry point `{point.name}` in group {point.group} of the installed package {who} {rule}; {remedy}, "
        f"or uninstall {package(point)}."
    )


def versions(used: Iterable[tuple[Kind, str]] | None = None) -> dict[str, str]:
    """Return the version and the digest of the code of each plug-in package, keyed by package.

    The digest is part of the version, because the code of a package that is being developed changes while its version
    stays the same.

    Args:
        used: The kind and the name of each class that a run uses; None for all plug-ins. Classes of fedsweep itself are
            ignored.
    """
    wanted = None if used is None else {(GROUPS[kind], name) for kind, name in used}
    names = {package(point) for point in installed() if wanted is None or (point.group, point.name) in wanted}
    return {name: _version(name) for name in sorted(names)}


@cache
def _version(name: str) -> str:
    """Return the version of a package and the first digits of the digest of its code, without importing it."""
    points = [point for point in installed() if package(point) == name]
    version = points[0].dist.version if points[0].dist is not None else "unknown"
    return f"{version} (code {digest(_code(points))[:12]})"


def _code(points: Iterable[EntryPoint]) -> dict[PurePath, Path]:
    """Return the code files of the package with these entry points, keyed by the path from which Python imports them.

    They are the files that the package's metadata list, and the top-level modules and packages of the entry points. The
    metadata of an editable installation list no code, so the Python files next to a single-file module count as well.
    """
    points = list(points)
    dist = points[0].dist
    files = _listed(dist) if dist is not None else {}
    listed = {path.resolve() for path in files.values()}
    site = Path(str(dist.locate_file(""))).resolve() if dist is not None else None
    for module in {point.module.partition(".")[0] for point in points}:
        spec = find_spec(module)
        folders = [Path(folder) for folder in (spec and spec.submodule_search_locations) or ()]
        for folder in folders:
            files |= code_files(folder, folder.parent)
        if spec is not None and spec.origin is not None and not folders and (path := Path(spec.origin)).is_file():
            files[PurePath(path.name)] = path
            if path.resolve() not in listed and site not in (None, path.parent.resolve()):
                near = {PurePath(one.name): one for one in path.parent.glob("*.py")}
                files |= {name: one for name, one in near.items() if is_code(name) and one.is_file()}
    return files


def _listed(dist: metadata.Distribution) -> dict[PurePath, Path]:
    """Return the code files that the metadata of a package list, keyed by the path from which Python imports them."""
    found = {PurePath(str(file)): Path(str(dist.locate_file(file))) for file in dist.files or ()}
    return {
        name: path
        for name, path in found.items()
        if is_code(name)
        and not name.parts[0].endswith((".dist-info", ".egg-info"))
        and not name.name.startswith(EDITABLE)
        and path.is_file()
    }
