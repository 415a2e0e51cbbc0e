"""Change the code in one place at a time, run the tests, and list the changes that no test notices.

    uv run python benchmarks/mutation.py --count 200 --seed 0
    uv run python benchmarks/mutation.py --count 200 --seed 0 --slice 50:100 --minutes 20

The mutants are drawn from the modules that decide a run's numbers. For each mutant, a process is forked that has
already imported torch, but not fedsweep. The process compiles the changed module, and runs the default tests that are
closest to the module until the first failure. A mutant dies from a failed test, an error or the limit on CPU time. A
failure counts only if all tests of the same file pass without the change.

Results are stored after each mutant. A later run skips recorded mutants. If the code has changed, mutants that no
longer exist are replaced by newly drawn mutants. To judge survivors again, for example after writing a test, use
`--survivors`. In the results, `reason` is written by hand: the reason that no test can notice a surviving mutant.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # a forked process must not inherit threads of torch

import argparse
import ast
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import random
import resource
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from mutation_sites import sites
from mutation_tests import ROOT, modules, name_of, tests_of
from rich.console import Console

RESULTS = ROOT / "benchmarks" / "results" / "mutation.json"
IMPORTED = (
    "torch numpy scipy.stats sklearn.datasets sklearn.manifold pydantic yaml rich.progress rich.table PIL.Image "
    "safetensors.torch timm peft transformers.models.clip pyarrow.parquet grimp hypothesis pytest"
)
"""Modules that are imported once, before the first process is forked."""
CPU_SECONDS, WALL_SECONDS = 480, 2400
IMPORTED_EARLY = "ignore::pytest.PytestAssertRewriteWarning"
OPTIONS = ("-x", "-q", "-n0", "-p", "no:cacheprovider", "--tb=no", "--no-header", "-W", IMPORTED_EARLY)
Result = dict[str, Any]
Identity = tuple[str, str, str, str, int]
NAMES = ("path", "kind", "before", "after", "nth")
"""The names of the entries of an identity in the results."""


@dataclass(frozen=True)
class Mutant:
    """A module, and the number of the place at which its code is changed."""

    path: Path
    number: int
    line: int
    identity: Identity
    """Path, kind, code before and after, and the place among all changes of the module that are equal in these."""

    def compile(self) -> CodeType:
        """Return the compiled code of the changed module."""
        tree = ast.parse(self.path.read_text())
        sites(tree)[self.number].change()
        return compile(ast.fix_missing_locations(tree), str(self.path), "exec")


class Changed(importlib.abc.MetaPathFinder, importlib.machinery.SourceFileLoader):
    """An import hook that loads the changed code in place of one module."""

    def __init__(self, mutant: Mutant) -> None:
        super().__init__(name_of(mutant.path), str(mutant.path))
        self.mutant = mutant

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the specification of the changed module, and None for all other modules."""
        if fullname != self.name:
            return None
        return importlib.util.spec_from_file_location(fullname, self.path, loader=self)

    def get_code(self, fullname: str) -> CodeType:
        """Return the changed code, which is never stored in a bytecode file."""
        return self.mutant.compile()


class FirstFailure:
    """A pytest plugin that remembers the first test or file that failed."""

    def __init__(self) -> None:
        self.name = ""

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Remember a failed test."""
        if report.failed:
            self.name = self.name or report.nodeid

    def pytest_collectreport(self, report: Any) -> None:
        """Remember a test file that cannot be imported."""
        if report.failed:
            self.name = self.name or report.nodeid


def run_tests(files: list[str], mutant: Mutant | None) -> tuple[str, str]:
    """Run tests in a forked process.

    Returns:
        `passed`, `failed`, `error`, `time limit` or `no tests`, and the name of the first test that failed.
    """
    reading, writing = os.pipe()
    with tempfile.TemporaryDirectory() as folder:
        process = os.fork()
        if process == 0:
            os.close(reading)
            _child(files, mutant, writing, folder)
        os.close(writing)
        with os.fdopen(reading) as pipe:
            answer = pipe.read()
        _, status = os.waitpid(process, 0)
    if not answer:
        late = os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGXCPU, signal.SIGKILL, signal.SIGALRM)
        return ("time limit" if late else "error"), ""
    code, name = json.loads(answer)
    return {0: "passed", 1: "failed", 5: "no tests"}.get(code, "error"), name


def _child(files: list[str], mutant: Mutant | None, writing: int, folder: str) -> None:
    """Run the tests in the forked process, and write pytest's exit code and the first failure to the pipe."""
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    signal.alarm(WALL_SECONDS)
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    failure, code = FirstFailure(), 3
    try:
        import pytest

        if mutant:
            sys.meta_path.insert(0, Changed(mutant))
        code = int(pytest.main([*files, *OPTIONS, f"--basetemp={folder}/pytest"], plugins=[failure]))
    finally:
        os.write(writing, json.dumps([code, failure.name]).encode())
        os._exit(0)


def judge(mutant: Mutant, baseline: dict[str, str]) -> Result:
    """Return the verdict on a mutant, and add the test files that ran without a change to `baseline`."""
    files, start = tests_of(mutant.path), time.monotonic()
    outcome, test = run_tests(files, mutant)
    file = test.split("::")[0] or files[0]
    if outcome != "passed" and file not in baseline:
        baseline[file], _ = run_tests([file], None)
    if outcome == "no tests" or (outcome != "passed" and baseline[file] != "passed"):
        verdict = "not judged"
    else:
        verdict = "survived" if outcome == "passed" else "killed"
    seconds = round(time.monotonic() - start, 1)
    found = {"verdict": verdict, "by": outcome, "test": test, "seconds": seconds, "reason": ""}
    return {**dict(zip(NAMES, mutant.identity, strict=True)), "line": mutant.line, **found}


def all_mutants() -> dict[Identity, Mutant]:
    """Return the mutants of all places of all modules, by identity."""
    found: dict[Identity, Mutant] = {}
    for path in modules():
        seen: Counter[tuple[str, str, str, str]] = Counter()
        for number, site in enumerate(sites(ast.parse(path.read_text()))):
            what = (path.relative_to(ROOT).as_posix(), site.kind, site.before, site.after)
            identity = (*what, seen[what])
            found[identity] = Mutant(path, number, site.line, identity)
            seen[what] += 1
    return found


def draw(known: Sequence[Identity], among: Sequence[Identity], count: int, seed: int) -> list[Identity]:
    """Return `count` mutants: those that were drawn before and still exist, and others with equal probability."""
    kept = [one for one in known if one in {*among}][:count]
    rest = [one for one in among if one not in {*kept}]
    return [*kept, *random.Random(seed).sample(rest, count - len(kept))]  # noqa: S311, no secret is drawn


def identity_of(result: Result) -> Identity:
    """Return the identity of a recorded mutant."""
    path, kind, before, after, nth = (result[name] for name in NAMES)
    return path, kind, before, after, nth


def summary(results: list[Result], places: int) -> str:
    """Return the page of results in Markdown."""
    judged = [one for one in results if one["verdict"] != "not judged"]
    survivors = [one for one in judged if one["verdict"] == "survived"]
    killed = len(judged) - len(survivors)
    share = f"{100 * killed / len(judged):.1f} %" if judged else "none"
    lines = [
        "# Mutants of the code that decides a run's numbers",
        "",
        "Written by `benchmarks/mutation.py`, which explains the method.",
        "A survivor passed the default tests closest to its module.",
        "",
        f"- Places at which the code can be changed: {places}",
        f"- Mutants judged: {len(judged)}; killed: {killed} ({share}); survived: {len(survivors)}",
        f"- Not judged, because the tests fail without a change or none was found: {len(results) - len(judged)}",
        "",
        "| place | kind | before | after | reason |",
        "| --- | --- | --- | --- | --- |",
    ]
    for one in survivors:
        cells = [f"{one['path']}:{one['line']}", one["kind"], _code(one["before"]), _code(one["after"]), one["reason"]]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _code(text: str) -> str:
    """Return the first 60 characters of an expression for a cell of a Markdown table."""
    flat = " ".join(text.split())
    return f"`{flat if len(flat) <= 60 else flat[:57] + '...'}`".replace("|", "\\|")


def main() -> None:
    """Judge the mutants that have no recorded verdict, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200, help="number of mutants to draw")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--slice", default=":", metavar="A:B", help="judge only these mutants of the draw")
    parser.add_argument("--survivors", action="store_true", help="judge recorded survivors without a reason again")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no mutant after this time")
    args = parser.parse_args()
    first, last = (int(one) if one else None for one in args.slice.split(":"))
    end, console = time.monotonic() + 60 * args.minutes, Console()
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"drawn": [], "baseline": {}, "mutants": []}
    os.chdir(ROOT)
    sys.path[0] = str(ROOT)
    for name in IMPORTED.split():
        importlib.import_module(name)
    mutants = all_mutants()
    drawn = draw([(*one,) for one in known["drawn"]], [*mutants], args.count, args.seed)
    recorded = {identity: one for one in known["mutants"] if (identity := identity_of(one)) in {*drawn}}
    if args.survivors:
        recorded = {key: one for key, one in recorded.items() if one["verdict"] != "survived" or one["reason"]}
    for identity in drawn[first:last]:
        if time.monotonic() > end:
            break
        if identity not in recorded:
            recorded[identity] = one = judge(mutants[identity], known["baseline"])
            console.print(*(one[key] for key in ("path", "line", "kind", "verdict", "by", "test", "seconds")))
        recorded[identity]["line"] = mutants[identity].line
        known |= {"drawn": drawn, "mutants": [recorded[one] for one in drawn if one in recorded]}
        RESULTS.write_text(json.dumps(known, indent=1) + "\n")
        RESULTS.with_suffix(".md").write_text(summary(known["mutants"], len(mutants)))


if __name__ == "__main__":
    main()
