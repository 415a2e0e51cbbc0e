"""Throw-away packages with entry points, which are installed by adding their folder to `sys.path`."""

import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

import fedsweep.methods
from fedsweep.common import plugins
from fedsweep.data.data_config import data_sources
from fedsweep.training.aggregation_rules import aggregation_rules
from fedsweep.training.round_metrics import round_metrics

METHOD = '''
from typing import Literal

from pydantic import Field

from fedsweep.methods.base import FederatedMethod


class Odd(FederatedMethod):
    """A method that only a test knows."""

    name: Literal["odd"] = "odd"
    strength: float = Field(0.5, ge=0, description="strength of the oddness")
'''

Install = Callable[..., Path]


def write_package(
    folder: Path, code: str, groups: Mapping[str, Mapping[str, str]], package: str = "odd-package", version: str = "0.1"
) -> None:
    """Write a module and the metadata of its package into `folder`, as pip does when it installs the package.

    Args:
        folder: The folder, which is on `sys.path`.
        code: The code of the module, whose name is the package's with underscores.
        groups: The value of each entry point, by group without `fedsweep.` and by name.
        package: The name of the package.
        version: The version of the package.
    """
    module = package.replace("-", "_")
    folder.mkdir(exist_ok=True)
    (folder / f"{module}.py").write_text(code)
    information = folder / f"{module}-0.dist-info"
    information.mkdir(exist_ok=True)
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    lines = [
        line
        for group, points in groups.items()
        for line in (f"[fedsweep.{group}]", *(f"{name} = {value}" for name, value in points.items()))
    ]
    (information / "entry_points.txt").write_text("\n".join(lines) + "\n")


def write_metadata(folder: Path, pyproject: str) -> None:
    """Write the metadata of the package that the text `pyproject` describes, as an installation from its folder does.

    The package's modules must be importable, for example because their folder is on `sys.path`.
    """
    project = tomllib.loads(pyproject)["project"]
    information = folder / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    information.mkdir(parents=True)
    about = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    (information / "METADATA").write_text(about)
    lines = [
        line
        for group, points in project["entry-points"].items()
        for line in (f"[{group}]", *(f"{name} = {value}" for name, value in points.items()))
    ]
    (information / "entry_points.txt").write_text("\n".join(lines) + "\n")


def forget() -> None:
    """Forget the plug-ins that were found, so that they are looked for again."""
    plugins.installed.cache_clear()
    plugins._version.cache_clear()
    fedsweep.methods._all.cache_clear()
    data_sources.cache_clear()
    aggregation_rules.cache_clear()
    round_metrics.cache_clear()


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Return a function that installs a package in this process (see `write_package`) and returns its folder."""
    folder, before = tmp_path / "site-packages", set(sys.modules)
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)

    def make(code: str = METHOD, groups: Mapping[str, Mapping[str, str]] | None = None, **about: str) -> Path:
        write_package(folder, code, groups or {"methods": {"odd": "odd_package:Odd"}}, **about)
        sys.modules.pop(about.get("package", "odd-package").replace("-", "_"), None)
        forget()
        return folder

    yield make
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__file__", None) and folder in Path(sys.modules[name].__file__ or "").parents:
            del sys.modules[name]
    forget()
