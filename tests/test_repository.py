"""The files for people who join the project: GitHub's workflow and forms, the hooks for commits, the citation."""

import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from fedsweep import cli

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
WORKFLOW = ROOT / ".github" / "workflows" / "ci.yml"
FORMS = ROOT / ".github" / "ISSUE_TEMPLATE"
CITATION = ROOT / "CITATION.cff"
HOOKS = ROOT / ".pre-commit-config.yaml"
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()
SCHEMAS = {
    "github-workflows": [WORKFLOW],
    "github-issue-forms": [FORMS / "bug_report.yml", FORMS / "method_question.yml"],
    "github-issue-config": [FORMS / "config.yml"],
    "citation-file-format": [CITATION],
}
"""For each JSON schema that check-jsonschema contains, the files of the repository that must follow it."""
DEVELOPMENT = {re.split(r"[\[<>=]", one)[0] for one in PROJECT["dependency-groups"]["dev"]}
"""The names of the packages that developers install."""


def read(path: Path) -> Any:
    """Read a YAML file in which `on` is a name, as for GitHub, and not a truth value, as in YAML 1.1."""
    data = yaml.safe_load(path.read_text())
    return {"on" if key is True else key: value for key, value in data.items()}


def faults(schema: str, *paths: Path) -> str:
    """Return the report of check-jsonschema on files that break one of its schemas, or an empty text."""
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{schema}"]
    done = subprocess.run([*command, *paths], capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else done.stdout + done.stderr


@pytest.mark.parametrize("schema", SCHEMAS)
def test_the_files_follow_their_schema(schema: str, tmp_path: Path):
    files = SCHEMAS[schema]
    assert faults(schema, *files) == ""
    broken = tmp_path / files[0].name
    broken.write_text(f"{files[0].read_text()}unknown-key: 1\n")
    if schema == "citation-file-format":
        broken.write_text(files[0].read_text().replace("cff-version: 1.2.0", "cff-version: 1"))
    assert "chema validation errors" in faults(schema, broken)


def test_every_file_for_github_is_checked():
    found = {path for path in (ROOT / ".github").rglob("*") if path.is_file()}
    template = ROOT / ".github" / "pull_request_template.md"
    assert found == {*(path for files in SCHEMAS.values() for path in files), template} - {CITATION}


def check_command(command: str) -> None:
    """Check that a shell command refers only to existing files, packages and markers.

    Raises:
        AssertionError: If the command starts with a program that is not known here, or names something missing.
    """
    words = shlex.split(command)
    if words[:2] == ["uv", "run"]:
        words = words[2:]
        assert words[0] in DEVELOPMENT, command
    else:
        assert words[0] == "bash", command
    for word in words[1:]:
        assert "/" not in word or (ROOT / word).exists(), word
    if "-m" in words and words[0] == "pytest":
        markers = {one.partition(":")[0] for one in PROJECT["tool"]["pytest"]["ini_options"]["markers"]}
        assert words[words.index("-m") + 1] in markers, command


@pytest.mark.parametrize(
    "command", ["bash .ci/walk", "uv run nothing", "uv run pytest -m fast", "uv run pytest tests/test_no.py", "make"]
)
def test_a_command_that_cannot_work_is_detected(command: str):
    with pytest.raises(AssertionError):
        check_command(command)


def test_the_workflow_runs_all_checks_on_linux_and_the_quick_tests_on_macos():
    jobs = read(WORKFLOW)["jobs"]
    ran = {name: [step["run"] for step in job["steps"] if "run" in step][-1] for name, job in jobs.items()}
    assert ran == {"all-checks": "bash .ci/run", "quick-tests": "uv run pytest -m quick"}
    assert {name: job["runs-on"].split("-")[0] for name, job in jobs.items()} == {
        "all-checks": "ubuntu",
        "quick-tests": "macos",
    }
    for command in ran.values():
        check_command(command)
        assert command in CONTRIBUTING
    oldest, after = map(int, re.findall(r"3\.(\d+)", PROJECT["project"]["requires-python"]))
    assert jobs["all-checks"]["strategy"]["matrix"]["python"] == [f"3.{oldest}", f"3.{after - 1}"]
    for job in jobs.values():
        assert job["timeout-minutes"] <= 150


def test_the_workflow_has_few_permissions_and_pinned_actions():
    text, workflow = WORKFLOW.read_text(), read(WORKFLOW)
    assert workflow["permissions"] == {"contents": "read"}
    assert not any("permissions" in job for job in workflow["jobs"].values())
    assert workflow["on"].keys() == {"push", "pull_request", "workflow_dispatch"}
    assert workflow["concurrency"]["cancel-in-progress"] is True
    assert "secrets" not in text
    steps = [step for job in workflow["jobs"].values() for step in job["steps"] if "uses" in step]
    assert len(steps) == 4
    assert text.count("uses: ") == len(re.findall(r"uses: [\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+$", text, re.M))
    assert [step["with"]["persist-credentials"] for step in steps[::2]] == [False] * 2
    for step in steps[1::2]:
        assert step["with"]["enable-cache"] is True
        assert (ROOT / step["with"]["cache-dependency-glob"]).is_file()


def test_the_hooks_run_the_tools_of_the_project():
    subprocess.run([sys.executable, "-m", "pre_commit", "validate-config", HOOKS], check=True)
    (repository,) = read(HOOKS)["repos"]
    assert repository["repo"] == "local"  # the versions are those of the environment
    hooks = {hook["id"]: hook for hook in repository["hooks"]}
    assert [*hooks] == ["ruff-check", "ruff-format", "mypy", "prose"]
    for hook in hooks.values():
        assert hook["language"] == "system"
        check_command(hook["entry"])
    checked = [
        path for path in ("fedsweep/a.py", "scripts/a.py", "tests/a.py") if re.search(hooks["mypy"]["files"], path)
    ]
    assert checked == [f"{folder}/a.py" for folder in PROJECT["tool"]["mypy"]["files"]]
    assert "uv run pre-commit install" in CONTRIBUTING


def test_the_forms_ask_for_what_helps():
    command = "fedsweep doctor --format json"
    forms = {path.stem: read(path) for path in SCHEMAS["github-issue-forms"]}
    fields = {name: {one["id"]: one for one in form["body"] if "id" in one} for name, form in forms.items()}
    required = {
        name: [key for key, one in those.items() if one.get("validations", {}).get("required")]
        for name, those in fields.items()
    }
    assert required["bug_report"] == ["command", "output", "expected", "doctor"]
    assert required["method_question"] == ["method", "question"]
    assert f"`{command}`" in fields["bug_report"]["doctor"]["attributes"]["label"]
    known: Any = typer.main.get_command(cli.app)
    text = "".join(path.read_text() for path in SCHEMAS["github-issue-forms"])
    quoted = re.findall(r"`(fedsweep [^`]+)`", text)
    assert command in quoted
    for one in quoted:
        assert known.commands[one.split()[1]] is not None
    known.commands["doctor"].make_context("doctor", command.split()[2:])
    pages = re.findall(r"`(docs/\S+)`", text)
    assert len(pages) == 2
    assert all((ROOT / page).is_file() for page in pages)


def test_the_pull_request_template_refers_to_the_checks():
    text = (ROOT / ".github" / "pull_request_template.md").read_text()
    assert "- [ ] `bash .ci/run` passes" in text
    named = re.findall(r"`([\w/]+\.md)`", text)
    assert named == ["CONTRIBUTING.md", "CHANGELOG.md"]
    assert all((ROOT / name).is_file() for name in named)


def test_the_citation_agrees_with_the_project():
    citation, project = read(CITATION), PROJECT["project"]
    assert (citation["title"], citation["abstract"]) == (project["name"], project["description"])
    assert (citation["license"], citation["keywords"]) == (project["license"], project["keywords"])
    assert citation["authors"] == [{"name": "The fedsweep developers"}]
    assert not citation.keys() & {"doi", "identifiers", "version", "date-released"}  # nothing has been released
