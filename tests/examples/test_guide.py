"""The guide on methods of other packages, whose files are written and whose commands are run in miniature."""

import inspect
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from fedsweep.methods.base import FederatedMethod
from tests.plugin_packages import write_metadata
from tests.test_docs import PLUGIN, ROOT, blocks

SMALL = (
    *("federation.rounds=1", "local.steps=1", "federation.depths=[2, 1]", "data.domains=[plain, noisy]"),
    *("local.batch_size=8", "federation.evaluate_every=1"),
)
MORE = {"run": SMALL, "tune": ("--seeds", "0,1", *SMALL)}
"""Words that make the commands of the guide short, by command."""


def files() -> dict[str, str]:
    """Return the contents of the files that the guide asks readers to write, by path."""
    found = {}
    for body in blocks((ROOT / PLUGIN).read_text(), "toml", "python", "yaml"):
        path, content = body.split("\n", 1)
        found[path.removeprefix("# ")] = content
    return found


def commands() -> list[list[str]]:
    """Return the words of each command in the guide."""
    return [shlex.split(line) for body in blocks((ROOT / PLUGIN).read_text(), "sh") for line in body.splitlines()]


def test_the_guide_shows_three_files_and_seven_commands() -> None:
    assert [*files()] == ["pyproject.toml", "my_fedprox_a.py", "search_spaces/my_fedprox_a.yaml"]
    assert [words[:2] for words in commands()] == [
        ["pip", "install"],
        *(["fedsweep", verb] for verb in ("doctor", "show", "run")),
        ["python", "-m"],
        *(["fedsweep", verb] for verb in ("tune", "report")),
    ]


def test_the_table_of_functions_has_the_order_and_the_arguments_of_the_base_class() -> None:
    shown = re.findall(r"^\| `(\w+)\((.+?)\)` \|", (ROOT / PLUGIN).read_text(), re.MULTILINE)
    functions = {name: one for name, one in vars(FederatedMethod).items() if inspect.isfunction(one) and name[0] != "_"}
    assert [name for name, _ in shown] == [*functions][[*functions].index("begin_round") :]
    for name, arguments in shown:
        known = [*inspect.signature(functions[name]).parameters][1:]
        assert arguments.removesuffix(", ...").split(", ") == (known[:3] if arguments.endswith("...") else known)


@pytest.mark.slow
def test_the_files_and_commands_of_the_guide_work(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    for name, content in files().items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    write_metadata(tmp_path / "site", files()["pyproject.toml"])
    given = os.environ | {"PYTHONPATH": f"{tmp_path / 'site'}{os.pathsep}{folder}", "COLUMNS": "160"}
    given["RAY_AUTH_MODE"] = "disabled"
    said = []
    for command, *words in commands()[1:]:
        called = words if command == "python" else ["-m", command, *words, *MORE.get(words[0], ())]
        done = subprocess.run([sys.executable, *called], cwd=folder, env=given, capture_output=True, text=True)
        assert done.returncode == 0, f"{called}: {done.stdout}{done.stderr}"
        said.append(done.stdout)
    doctor, show, _, conformance, tune, report = said
    assert re.search(r"plug-ins: my-fedprox-a 0\.1 \(code \w{12}\), methods: my_fedprox_a", doctor)
    assert "method.mu: 0.1" in show
    assert " passed" in conformance
    assert "mu" in tune
    assert "mu" in report
