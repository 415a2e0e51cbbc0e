"""The documentation, whose commands, reference and links must agree with the code."""

import inspect
import re
import shlex
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import typer

import fedsweep
from fedsweep import cli
from fedsweep.cli import json_results
from fedsweep.cli.early_check import SCHEMAS
from fedsweep.cli.init import files, of_images
from fedsweep.cli.options import check_format, listed
from fedsweep.cli.report import FILES
from fedsweep.cli.tune import space_changes
from fedsweep.common.config import flat
from fedsweep.common.errors import UserError
from fedsweep.common.paths import find, find_either
from fedsweep.common.randomness import STREAMS
from fedsweep.common.yaml_values import parse_overrides, read_yaml
from fedsweep.federation.run_config import RunConfig
from fedsweep.preparation.plan import Options
from fedsweep.pretraining.config import PretrainConfig
from fedsweep.results.arms import Arm, parse_arm
from fedsweep.results.table_columns import COLUMNS, check_columns
from fedsweep.results.tune_command import SPACE_OPTIONS
from fedsweep.sweep.plan.plan import Plan
from fedsweep.sweep.plan.resolved_space import ResolvedSpace
from tests.scripts import SCRIPTS, load_script

pytestmark = pytest.mark.usefixtures("read_once", "listed_once")

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")] + sorted(
    (ROOT / "docs").rglob("*.md")
)
YAMLS = sorted((ROOT / "experiments").rglob("*.yaml")) + sorted((ROOT / "search_spaces").rglob("*.yaml"))
VERBS: dict[str, Any] = typer.main.get_command(cli.app).commands  # type: ignore[attr-defined]
PLANS: dict[tuple[Path, str, str, str], Plan] = {}
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def blocks(text: str, *languages: str) -> list[str]:
    """Return the code blocks of a page in the given languages."""
    return [body for language, body in BLOCK.findall(text) if language in languages]


def commands(path: Path) -> list[str]:
    """Return the fedsweep commands in the code blocks and examples of a page, or in the comments of a YAML file."""
    text = path.read_text()
    if path.suffix == ".yaml":
        lines = [line.removeprefix("#").strip() for line in text.splitlines() if line.startswith("#")]
    else:
        shown = "\n".join(blocks(text, "sh", "yaml")).splitlines()
        lines = [line.removeprefix("#").strip() for line in shown] + re.findall(
            r"^Example: `(.+)`$", text, re.MULTILINE
        )
    found = [re.search(r"^(?:pip install uv && )?(?:uv run )?(fedsweep [a-z].+)$", line) for line in lines]
    return [match[1] for match in found if match]


PLUGIN = "docs/guides/your_own_method.md"
"""The page whose commands need a plug-in; tests/examples/test_guide.py runs them."""
SHOWN = {path.relative_to(ROOT).as_posix(): found for path in [*PAGES, *YAMLS] if (found := commands(path))}


def test_commands_are_found():
    where = set(SHOWN)
    assert sum(map(len, SHOWN.values())) >= 400
    assert {"README.md", "docs/guides/first_sweep.md", "docs/guides/your_own_search_space.md"} < where
    assert {"docs/guides/resume_and_prune.md", "docs/reference/cli.md"} < where
    assert {path.relative_to(ROOT).as_posix() for path in YAMLS} < where


def parse(command: str) -> tuple[str, dict[str, Any]]:
    """Return a command's name, e.g. `run` or `data show`, and its parsed arguments."""
    _, verb, *words = shlex.split(command, comments=True)
    parser = VERBS[verb]
    if below := getattr(parser, "commands", None):
        verb, parser, words = f"{verb} {words[0]}", below[words[0]], words[1:]
    return verb, parser.make_context(verb, words).params


def check(command: str) -> None:
    """Parse a command and resolve all names in it without running the command."""
    verb, given = parse(command)
    changes = parse_overrides(given.get("overrides") or [])
    match verb:
        case "run" | "data generate":
            resolve(given["experiment"], changes)
        case "tune":
            plan(given["space"], changes, space_changes(given))
        case "show" | "data partition":
            kind, _ = find_either(given["name"])
            resolve(given["name"], changes) if kind == "experiments" else plan(given["name"], changes)
        case "confirm":
            find("search_spaces", given["sweep"])
        case "report":
            find("search_spaces", given["space"])
            base = plan(given["space"]).base
            check_columns(listed(given["columns"] or ""), base.metrics(), "accuracy/mean", "--columns")
            check_format(given["format"], ("terminal", "json", *FILES))
        case "compare":
            for side in (given["first"], given["second"]):
                where, _, arm = side.partition(":")
                space = where.partition("@")[0]
                find("search_spaces", space)
                varied = plan(space).space.names
                assert set(parse_arm(arm) if arm else {}) <= {*varied}, side
        case "pretrain":
            path = find("pretrain", given["experiment"])
            PretrainConfig.of(read_yaml(path), path.name).override(changes, path.name)
        case "data prepare":
            Options(given["name"], given["size"], given["layout"], given["backbone"]).check()


def plan(space: str, changes: dict | None = None, options: dict | None = None) -> Plan:
    """Return the plan of a search space from a cache; about 100 arms of a large grid are resolved."""
    key = (Path.cwd(), space, repr(changes or {}), repr(options or {}))
    resolve_valid = ResolvedSpace.resolve_valid

    def resolve_some(resolved: ResolvedSpace, arms: Collection[Arm]) -> Any:
        return resolve_valid(resolved, [*arms][:: 1 + len(arms) // 100])

    if key not in PLANS:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ResolvedSpace, "resolve_valid", resolve_some)
            PLANS[key] = Plan.read(space, changes or {}, options or {})
    return PLANS[key]


def resolve(experiment: str, changes: dict) -> None:
    RunConfig.of(read_yaml(find("experiments", experiment)), experiment).override(changes, experiment)


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    """Write the YAML files that the pages ask readers to create, and return their folder."""
    folder = tmp_path_factory.mktemp("written")
    for page in (one for one in PAGES if one != ROOT / PLUGIN):
        for body in blocks(page.read_text(), "yaml"):
            first, rest = body.split("\n", 1)
            assert first.startswith(("# search_spaces/", "# experiments/")), f"{page.name}: a block lacks its path"
            path = folder / first.removeprefix("# ")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(rest)
    (drawing,) = blocks((ROOT / "docs" / "guides" / "your_own_project.md").read_text(), "python")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("drawn"))
        exec(drawing, {})  # noqa: S102
        project = files(of_images(Path("shapes"), Path("study").absolute()))
    for name in ("experiments/shapes.yaml", "search_spaces/lora_rank.yaml"):
        folder.joinpath(name).write_text(project[name])
    return folder


@pytest.fixture
def working_directory(written, monkeypatch, pacs) -> Path:
    """Change the working directory to the folder of the fixture `written`."""
    monkeypatch.chdir(written)
    return written


@pytest.mark.parametrize("page", SHOWN)
def test_the_commands_of_a_page_work(working_directory, page):
    own = page.removesuffix(".yaml").replace("search_spaces/", "fedsweep tune ")  # resolved in test_yaml_files.py
    for command in dict.fromkeys(SHOWN[page]):
        try:
            parse(command) if command == own or page == PLUGIN else check(command)
        except Exception as error:
            raise AssertionError(command) from error


@pytest.mark.parametrize(
    "command",
    ["fedsweep run fedra_digits lora.rnk=4", "fedsweep tune ablations/lora_rank --sample 3", "fedsweep show nothing"],
)
def test_an_invalid_command_is_detected(working_directory, command):
    with pytest.raises((UserError, cli._UsageError)):
        check(command)


def test_the_files_that_a_guide_shows_are_valid(working_directory):
    found = sorted(working_directory.rglob("*.yaml"))
    assert len(found) == 22 + 2
    for path in found:
        kind, *parts = path.relative_to(working_directory).with_suffix("").parts
        if kind == "experiments":
            resolve("/".join(parts), {})
        else:
            assert Plan.read("/".join(parts), {}, {}).num_trials > 1


def test_the_reference_is_up_to_date(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)
    script = load_script("write_reference")
    pages = script.pages()
    assert set(pages) == {"cli.md", "hyperparameters.md", "json.md", "python.md", "search_spaces.md"}
    for name, text in pages.items():
        assert (ROOT / "docs" / "reference" / name).read_text() == text, "run scripts/write_reference.py"
    assert SCHEMAS.read_text() == script.schemas(), "run scripts/write_reference.py"


def test_every_function_of_the_python_interface_is_in_the_reference():
    text = (ROOT / "docs" / "reference" / "python.md").read_text()
    names = re.findall(r"import (\w+) as", (ROOT / "fedsweep" / "__init__.pyi").read_text())
    assert len(names) == 4
    for name in names:
        assert f"\n## {name}\n" in text
        for argument in inspect.signature(getattr(fedsweep, name)).parameters:
            assert f"- `{argument}`: " in text, argument


def test_every_search_space_is_in_the_reference():
    text = (ROOT / "docs" / "reference" / "search_spaces.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| .+ \| (\d+|sampled) \| (.+) \| `\w+` \|$", text, re.MULTILINE)
    names = [path.stem for path in YAMLS if "search_spaces" in path.parts]
    assert sorted(name for name, _, _ in rows) == sorted(names)
    assert {*rows} >= {("lora_rank", "4", "at most 32"), ("accuracy_per_megabyte", "sampled", "16")}
    for space in ("ablations/fedag_components", "ablations/robustness", "papers/fedra/table1_digits"):
        resolved = plan(space)
        assert (space.rpartition("/")[2], str(len(resolved.arms)), str(resolved.num_trials)) in rows


def test_every_hyperparameter_is_in_the_reference():
    text = (ROOT / "docs" / "reference" / "hyperparameters.md").read_text()
    base = Plan.read("ablations/lora_rank", {}, {}).base
    names = [name for name in flat(base) if not name.endswith(".name")]
    assert len(names) >= 20
    assert [name for name in names if f"| `{name}` |" not in text] == []


def test_every_command_is_documented():
    reference = (ROOT / "docs" / "reference" / "cli.md").read_text()
    prose = "".join(path.read_text() for path in PAGES if "reference" not in path.parts)
    names = [f"{name} {below}".strip() for name, one in VERBS.items() for below in getattr(one, "commands", [""])]
    assert len(names) == 23
    for verb in names:
        assert f"\n## {verb}\n" in reference
        assert f"fedsweep {verb}" in prose


def test_every_metric_is_documented():
    text = (ROOT / "docs" / "concepts" / "metrics.md").read_text()
    metrics = Plan.read("ablations/lora_rank", {}, {}).base.metrics()
    names = {"accuracy/domain/<name>" if name.startswith("accuracy/domain/") else name for name in metrics}
    assert {"accuracy/last_rounds", "loss/last_rounds"} <= names
    assert len(names) == 18
    asked = Plan.read("ablations/brick_over_depth_methods", {}, {}).base.metrics()
    names |= {name for name in asked if name.startswith(("drift/", "structural_bias/"))}
    assert len(names) == 18 + 7
    assert [name for name in sorted(names) if f"| `{name}` |" not in text] == []


def test_the_table_of_random_streams_is_that_of_the_code():
    text, groups = (ROOT / "docs" / "concepts" / "reproducibility.md").read_text(), dict[str, set[str]]()
    for group, purposes in re.findall(r"^\| ?(?:`(\w+)` )?\| (`[^|]+`) \|", text, re.MULTILINE):
        name = group or [*groups][-1]
        groups.setdefault(name, set()).update(re.findall("`([^`]+)`", purposes))
    assert groups == {name: {*group.purposes} for name, group in STREAMS.items()}
    assert [*groups] == [*STREAMS]


def test_every_column_is_documented():
    text = (ROOT / "docs" / "guides" / "report.md").read_text()
    assert [name for name in COLUMNS if f"`{name}`" not in text] == []


def test_the_readme_starts_with_its_two_commands():
    shown = blocks((ROOT / "README.md").read_text(), "sh")
    assert shown[0] == "pip install uv && uv run fedsweep tune ablations/lora_rank\n"
    assert shown[1] == "pip install uv && uv run pytest\n"


def test_the_documented_packages_are_those_of_the_import_contracts():
    text = (ROOT / "docs" / "architecture.md").read_text()
    contract = re.search(r"^layers = \[(.*?)^\]", (ROOT / "pyproject.toml").read_text(), re.DOTALL | re.MULTILINE)
    assert contract is not None
    layers = [line.replace("fedsweep.", "") for line in re.findall(r'"(.+)"', contract[1])]
    drawn = [re.split(r"\s{3,}", line)[0] for line in blocks(text, "text")[0].splitlines()]
    assert drawn == layers


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_page_has_no_local_path_and_its_links_work(page):
    text = page.read_text()
    assert re.findall(r"(?<![\w.])(?:/work|/home|/root|/tmp|/Users|[A-Z]:\\)[/\\]?\S*", text) == []
    for link in re.findall(r"\]\(([^)#]+)", text):
        assert link.startswith("https://") or (page.parent / link).exists(), link


def test_all_pages_are_found():
    assert len(PAGES) == 53


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives the headings of a page: no punctuation, and a hyphen for each space."""
    headings = re.findall(r"^#+ (.+)$", BLOCK.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_anchors_of_links_exist():
    found = [
        (page, link, anchor)
        for page in PAGES
        for link, anchor in re.findall(r"\]\(([^)#\s]*)#([^)]+)\)", page.read_text())
        if "://" not in link
    ]
    assert len(found) >= 100
    missing = [
        f"{page.relative_to(ROOT)}: {link}#{anchor}"
        for page, link, anchor in found
        if anchor not in anchors(page.parent / link if link else page)
    ]
    assert missing == []


def test_the_navigation_of_the_site_lists_each_page_once():
    sections = load_script("build_site").navigation()
    assert [title for title, _ in sections] == [
        "Home", "Tutorial", "How-to guides", "Reference", "Explanation", "Results"
    ]  # fmt: skip
    listed = sorted(path for _, paths in sections for path in paths)
    assert listed == sorted(path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md"))


def test_the_list_of_pages_for_agents_has_valid_commands():
    text = load_script("build_site").llms(ROOT / "docs")
    (shown,) = blocks(text, "sh")
    verbs = [parse(command)[0] for command in shown.splitlines()]
    assert verbs == ["tune", "status", "extend", "stop", "report"]
    assert all(command.endswith(" --format json") for command in shown.splitlines())
    pages = re.findall(r"^- \[.+\]\((.+\.md)\): \S.+$", text, re.MULTILINE)
    assert len(pages) == len(list((ROOT / "docs").rglob("*.md")))
    assert {"reference/json.md", "guides/steering.md"} <= {*re.findall(r"\]\((.+?)\)", text)}
    assert "What a trial showed" not in text
    (read,) = blocks(text, "bash")
    assert all(f"{name}" in json_results.ARM for name in re.findall(r"\w+", re.findall(r"\{(.+?)\}", read)[0]))
    assert {"label", "seed", "traceback"} <= json_results.FAILURE.keys()


def test_the_list_of_pages_for_agents_has_whole_sentences():
    first = load_script("build_site")._first_sentence
    assert first("# A\n\nOne kind of\nquestion: which? Others.") == "One kind of question: which?"
    assert first("# A\n\n<!-- no -->\n\n| a |\n\nA [list](b.md):\n\n- one") == "A list"


def test_the_script_that_builds_the_site_has_a_help_and_replaces_no_other_folder(monkeypatch, capsys, tmp_path):
    script = load_script("build_site")
    monkeypatch.setattr(script, "build", lambda folder: print("built", folder))
    for words, said in ((["--help"], "new folder, or an older site"), ([str(tmp_path)], "is not a site that")):
        monkeypatch.setattr("sys.argv", ["build_site.py", *words])
        with pytest.raises(SystemExit):
            script.main()
        printed = capsys.readouterr()
        assert said in " ".join((printed.out + printed.err).split())
        assert "built" not in printed.out
    monkeypatch.setattr("sys.argv", ["build_site.py", str(tmp_path / "new")])
    script.main()
    assert capsys.readouterr().out == f"built {tmp_path / 'new'}\n"


def test_the_page_on_resuming_lists_the_options_that_are_not_recorded():
    page = (ROOT / "docs" / "guides" / "resume_and_prune.md").read_text()
    listed_there = {*re.findall(r"`(--[a-z-]+)`", page.partition("are not recorded.")[2].partition("\n\n")[0])}
    others = {"at_once", "address", "store", "verify"}
    assert listed_there == {f"--{name.replace('_', '-')}" for name in others}
    assert not others & SPACE_OPTIONS.keys()


def test_messages_name_existing_pages_and_no_folder_that_a_wheel_lacks():
    code = [*(ROOT / "fedsweep").rglob("*.py"), *(ROOT / "fedsweep").rglob("*.jinja")]
    texts = {path: path.read_text() for path in code}
    shown = {path: re.sub(r'"""[\s\S]*?"""', "", text) for path, text in texts.items()}
    assert [path.name for path, text in shown.items() if re.search(r"docs/\S+\.md", text)] == []
    named = {page for text in shown.values() for page in re.findall(r"(\S+\.md) in the documentation", text)}
    assert {"concepts/statistics.md", "guides/tuning.md", "(cluster.md"} <= named
    assert all((ROOT / "docs" / page.lstrip("(")).is_file() for page in named)
