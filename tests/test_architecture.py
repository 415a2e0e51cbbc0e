"""The page docs/architecture.md, which must name existing packages, modules and objects."""

import importlib
import re
from pathlib import Path

import fedsweep

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "architecture.md").read_text()
PACKAGE = ROOT / "fedsweep"
ROOMS = {path.parent.name for path in PACKAGE.glob("*/__init__.py")} | {
    path.stem for path in PACKAGE.glob("*.py") if path.stem not in ("__init__", "__main__")
}


def section(title: str) -> str:
    """Return the text of docs/architecture.md below the second-level heading `title`."""
    return re.split(r"^## ", PAGE, flags=re.MULTILINE)[[*re.findall(r"^## (.+)$", PAGE, re.MULTILINE)].index(title) + 1]


def rows(text: str) -> list[list[str]]:
    """Return the cells of all tables in a text, row by row, without headings."""
    cells = [[one.strip() for one in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    rules = [place for place, row in enumerate(cells) if set(row[0]) <= {"-", ":", " "}]
    return [row for place, row in enumerate(cells) if place not in rules and place + 1 not in rules]


def resolve(name: str) -> object:
    """Return the module or object with this dotted name below `fedsweep`."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(["fedsweep", *parts[:length]]))
        except ModuleNotFoundError:
            continue
        for part in parts[length:]:
            found = getattr(found, part) if hasattr(found, part) else vars(found)["__annotations__"][part]
        return found
    raise ModuleNotFoundError(name)


def test_every_package_has_a_line():
    rooms = [row[0].strip("`") for row in rows(section("Packages"))]
    assert sorted(rooms) == sorted(ROOMS)
    layers = re.search(r"^```text\n(.*?)^```$", section("Packages"), re.DOTALL | re.MULTILINE)
    assert layers is not None
    assert len(layers[1].splitlines()) <= len(rooms)
    assert fedsweep.__doc__


def test_no_module_is_longer_than_350_lines():
    lengths = {path.relative_to(ROOT).as_posix(): len(path.read_text().splitlines()) for path in PACKAGE.rglob("*.py")}
    assert len(lengths) > 200
    assert not {name: length for name, length in lengths.items() if length > 350}


def test_every_dotted_name_exists():
    names = {name for name in re.findall(r"`([a-z_]+(?:\.\w+)+)`", PAGE) if name.split(".")[0] in ROOMS}
    files = {name for name in names if name.endswith((".py", ".md", ".json", ".yaml"))}
    assert len(names - files) > 25
    for name in names - files:
        resolve(name)


def test_the_steps_of_a_sweep_can_be_imported():
    steps = re.findall(r"^(sweep\.\S+)", section("The steps of a sweep"), re.MULTILINE)
    assert len(steps) == 7
    for step in steps:
        resolve(step)


def test_the_names_on_the_path_of_a_hyperparameter_can_be_imported():
    stations = rows(section("The path of `lora.rank` through the code"))
    names = [name for row in stations[1:] for name in re.findall(r"`([\w.]+)`", row[1])]
    assert len(names) >= len(stations)
    for name in names:
        resolve(name)
