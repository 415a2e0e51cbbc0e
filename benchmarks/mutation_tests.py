"""The modules that `benchmarks/mutation.py` changes, and the test files that it runs for a module."""

import ast
from functools import cache
from pathlib import Path

import grimp

ROOT = Path(__file__).parents[1]
ROOMS = ("common", "data", "models", "training", "methods", "federation")
WITHOUT_NUMBERS = {"progress.py", "process_usage.py", "errors.py"}
"""Modules that only print, measure or explain."""
WHOLE_RUNS = ("tests/federation", "tests/conformance")
DEFAULTS = "tests/test_docs.py::test_the_reference_is_up_to_date"
"""The test that compares the default values of all hyperparameters with the documentation."""
REFUSALS = "tests/common/test_config.py"
"""The tests of the error messages about invalid hyperparameters, which are tested together for all modules."""
FILES = 24
"""Largest number of test files that run for one mutant."""


def modules() -> list[Path]:
    """Return the modules that decide a run's numbers."""
    package = ROOT / "fedsweep"
    found = [path for room in ROOMS for path in sorted((package / room).rglob("*.py"))]
    return [package / "types.py", *(path for path in found if path.name not in WITHOUT_NUMBERS)]


def name_of(path: Path) -> str:
    """Return the dotted name of a module."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def tests_of(module: Path) -> list[str]:
    """Return the test files that reach a module by their imports, the closest first.

    The tests of the same room that are named after the module or its folder come first. The room's other tests that
    import the module or its package, the tests of whole runs, and all other tests that import the module directly
    follow. The last tests are those in `REFUSALS` if the module may reject values, and `DEFAULTS` if the module may
    define hyperparameters.
    """
    name, tests = name_of(module), ROOT / "tests"
    package = name.rpartition(".")[0]
    room = module.relative_to(ROOT / "fedsweep").parts[0]
    own = {module.stem, *module.relative_to(ROOT / "fedsweep").parts[1:-1]}

    def distance(file: Path) -> int | None:
        place = file.relative_to(ROOT).as_posix()
        direct, reached = _imported(file)
        if any(file.stem.startswith(f"test_{one}") or f"test_{one}".startswith(file.stem) for one in own):
            return 0 if file.parent.name == room else 1
        beside = package.count(".") > 1 and any(f"{one}.".startswith(f"{package}.") for one in direct)
        if file.parent.name == room and (name in direct or beside):
            return 1
        if place.startswith(WHOLE_RUNS):
            return 2 if "whole_runs" in place else 3
        if name in direct or beside:
            return 4
        return 5 if file.parent.name == room and name in reached else None

    ranked = [(rank, file) for file in tests.rglob("test_*.py") if (rank := distance(file)) is not None]
    text = module.read_text()
    refusals = [REFUSALS] if "Error(" in text else []
    defaults = [DEFAULTS] if "Field(" in text or "(Config)" in text else []
    files = [file.relative_to(ROOT).as_posix() for _, file in sorted(ranked)[:FILES]]
    return [*dict.fromkeys([*files, *refusals, *defaults])]


@cache
def _imported(file: Path) -> tuple[set[str], set[str]]:
    """Return the modules of fedsweep that a test file imports, and the modules that it reaches through them."""
    direct: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            direct |= {node.module, *(f"{node.module}.{one.name}" for one in node.names)}
        elif isinstance(node, ast.Import):
            direct |= {one.name for one in node.names}
    known = {one for one in direct if one in _graph().modules}
    return known, known.union(*(_graph().find_upstream_modules(one) for one in known))


@cache
def _graph() -> grimp.ImportGraph:
    return grimp.build_graph("fedsweep")
