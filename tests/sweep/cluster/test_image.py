"""The Dockerfile in deploy/, whose image the pods of the KubeRay files run; no test builds the image."""

import re
import tomllib
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import pytest
import yaml

ROOT = Path(__file__).parents[3]
DOCKERFILE = (ROOT / "deploy" / "Dockerfile").read_text()
IGNORED = (ROOT / ".dockerignore").read_text()


class Instruction(NamedTuple):
    """An instruction of a Dockerfile, and the text after its name on one line."""

    name: str
    text: str


def instructions(text: str) -> list[Instruction]:
    """Return the instructions of a Dockerfile in order, without comments."""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ").splitlines()
    return [Instruction(*line.split(maxsplit=1)) for line in joined]


def stages(text: str) -> list[list[Instruction]]:
    """Return the instructions of each stage. A stage begins with FROM; instructions before the first are left out."""
    found: list[list[Instruction]] = []
    for one in instructions(text):
        if one.name == "FROM":
            found.append([])
        if found:
            found[-1].append(one)
    return found


def texts(stage: list[Instruction], name: str) -> list[str]:
    return [one.text for one in stage if one.name == name]


def arguments(text: str) -> dict[str, str | None]:
    """Return the build arguments of a Dockerfile and their defaults."""
    declared = [one.text.partition("=") for one in instructions(text) if one.name == "ARG"]
    return {name: default if equals else None for name, equals, default in declared}


def copied(stage: list[Instruction]) -> list[str]:
    """Return the paths in the repository that a stage copies into the image."""
    sources = [text.split()[:-1] for text in texts(stage, "COPY") if not text.startswith("--from=")]
    return [path for paths in sources for path in paths]


def included(path: str) -> bool:
    """Return whether the build receives a file or folder of the repository.

    This understands only the patterns of this project's .dockerignore: everything, a path, an exception, and a name in
    any folder.
    """
    kept = True
    for line in IGNORED.splitlines():
        pattern = line.removeprefix("!")
        matches = (
            pattern == "*"
            or PurePosixPath(path).is_relative_to(pattern)
            or (pattern.startswith("**/") and pattern[3:] in PurePosixPath(path).parts)
        )
        if line and not line.startswith("#") and matches:
            kept = line.startswith("!")
    return kept


BUILD, FINAL = stages(DOCKERFILE)


def test_the_user_of_the_image_is_not_root_and_is_that_of_the_pods():
    (user,) = texts(FINAL, "USER")
    number, group = map(int, user.split(":"))
    assert min(number, group) >= 1000
    assert f"useradd --create-home --uid {number} --user-group" in " ".join(texts(FINAL, "RUN"))
    after = [one.name for one in FINAL[FINAL.index(Instruction("USER", user)) :]]
    assert after == ["USER", "WORKDIR", "RUN", "CMD"]  # the last RUN, which starts fedsweep, is not root
    seen = 0
    for name in ("kuberay_cluster.yaml", "kuberay_job.yaml"):
        manifest = yaml.safe_load((ROOT / "deploy" / name).read_text())
        cluster = manifest["spec"].get("rayClusterSpec", manifest["spec"])
        assert cluster["rayVersion"] == arguments(DOCKERFILE)["RAY"]
        for part in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
            context = part["template"]["spec"]["securityContext"]
            assert context["runAsNonRoot"] is True
            assert (context["runAsUser"], context["runAsGroup"], context["fsGroup"]) == (number, group, group)
            seen += 1
    assert seen == 4


def test_every_build_argument_is_used_and_described():
    declared = arguments(DOCKERFILE)
    read_by_a_program = {"UV_TORCH_BACKEND", "UV_DEFAULT_INDEX", "PIP_INDEX_URL"}
    assert declared.keys() == {"PYTHON", "UV", "RAY"} | read_by_a_program
    assert {name for name, default in declared.items() if default is None} == read_by_a_program
    for name in declared.keys() - read_by_a_program:
        assert f"${{{name}}}" in DOCKERFILE, name
    pages = (ROOT / "docs" / "cluster.md").read_text()
    _, rows = pages.split("| build argument | meaning |\n")
    table = rows.split("\n\n")[0]
    assert {name for row in table.splitlines() for name in re.findall(r"`([A-Z_]+)`", row.split("|")[1])} == {*declared}
    for name in re.findall(r"--build-arg (\w+)=", DOCKERFILE + pages):
        assert name in declared


def test_build_arguments_are_declared_before_the_command_that_reads_them():
    names = [one.text if one.name == "ARG" else one.name for one in BUILD]
    runs = [place for place, name in enumerate(names) if name == "RUN"]
    assert names.index("PIP_INDEX_URL") < runs[0]
    assert max(names.index("UV_TORCH_BACKEND"), names.index("UV_DEFAULT_INDEX")) < runs[1]
    assert len(runs) == 3


def test_the_dockerfile_names_no_host_and_no_address():
    images = [one.text.split()[0] for stage in (BUILD, FINAL) for one in stage if one.name == "FROM"]
    assert images == ["python:${PYTHON}-slim"] * 2  # the environment refers to this Python by its path
    assert "://" not in DOCKERFILE


def test_the_image_has_a_supported_python_and_only_the_environment():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    oldest, newest = map(int, re.findall(r"3\.(\d+)", project["requires-python"]))
    python = arguments(DOCKERFILE)["PYTHON"]
    assert python is not None
    assert oldest <= int(python.removeprefix("3.")) < newest
    assert texts(FINAL, "COPY") == ["--from=build /opt/fedsweep /opt/fedsweep"]
    assert "VIRTUAL_ENV=/opt/fedsweep" in texts(BUILD, "ENV")[0]
    (variables,) = texts(FINAL, "ENV")
    assert "PATH=/opt/fedsweep/bin:$PATH" in variables


def test_the_build_receives_the_files_that_it_copies_and_no_others():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    paths = copied(BUILD)
    assert all((ROOT / path).exists() for path in paths)
    assert all(included(path) for path in paths)
    shipped = project["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    needed = {"pyproject.toml", project["project"]["readme"], *project["project"]["license-files"], "fedsweep"}
    assert {*paths} == needed | {*shipped}  # all that a wheel is built from
    assert {line[1:] for line in IGNORED.splitlines() if line.startswith("!")} == {*paths}
    for path in (".git", ".venv", "data", "mlruns", "tests", "fedsweep/cli/__pycache__/help.pyc", ".ray_token_7"):
        assert not included(path), path


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("# note\nRUN a \\\n    && b\nUSER 1", [("RUN", "a      && b"), ("USER", "1")]),
        ("RUN a \\\n# note\n    b", [("RUN", "a      b")]),
    ],
)
def test_instructions_are_read_over_several_lines_and_without_comments(text, expected):
    assert instructions(text) == expected
